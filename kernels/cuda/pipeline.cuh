// The order and the shape of launches: which kernels make up a job. `Launcher` runs one kernel:
//   launch(kernel, blocks, threads, args, rows), of which the last may be left out: the grid's second dimension
// so that the same sequence runs on a device (codec.cu) and wherever else kernels can be run.
#pragma once

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/classify.cuh"
#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/jobs.h"
#include "kernels/cuda/layout.cuh"
#include "kernels/cuda/scan.cuh"
#include "kernels/cuda/spread.cuh"

namespace spectrumkv::gpu {

// Calls f.template operator()<kType>().
template <typename F>
void WithDType(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat16: return f.template operator()<DType::kFloat16>();
    case DType::kBFloat16: return f.template operator()<DType::kBFloat16>();
    case DType::kFloat32: return f.template operator()<DType::kFloat32>();
  }
}

// The same with the sets of a cell: 1, 2 or 4.
template <typename F>
void WithSets(DType dtype, uint32_t head_dim, const F& f) {
  WithDType(dtype, [&]<DType kType>() {
    if (head_dim <= kWarpLanes * kLaneValues) return f.template operator()<kType, 1>();
    if (head_dim <= 2 * kWarpLanes * kLaneValues) return f.template operator()<kType, 2>();
    f.template operator()<kType, 4>();
  });
}

// One kernel for all chunks of a batch; threads_of(chunk): that it needs.
template <typename Launcher, typename Kernel, typename ThreadsOf>
void LaunchBatch(Kernel kernel, const BatchArgs& batch, uint32_t count, uint32_t threads, const ThreadsOf& threads_of,
                 Launcher& launch) {
  uint32_t most = 1;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t blocks = BlocksFor(threads_of(batch.chunks[i]), threads);
    most = blocks > most ? blocks : most;
  }
  launch(kernel, most, threads, batch, count);
}

inline uint64_t CellThreads(const ChunkArgs& args, uint64_t planes, uint64_t rows) {
  return planes * rows * args.heads * args.cell_lanes;
}

template <typename Launcher>
void RunEncode(const EncodeJob* jobs, uint32_t count, void* workspace, Launcher& launch) {
  const BatchArgs batch = ArgsOf(jobs, count, workspace);
  const auto tokens = [](const ChunkArgs& args) { return uint64_t{args.tokens} * kWarpLanes; };
  const auto one = [](const ChunkArgs&) { return uint64_t{1}; };
  const auto centres = [](const ChunkArgs& args) {
    return CellThreads(args, 1, (args.tokens + kCentreTokens - 1) / kCentreTokens);
  };
  const auto cells = [](const ChunkArgs& args) { return CellThreads(args, args.planes, args.tokens); };
  WithDType(jobs->dims.dtype, [&]<DType kType>() {
    LaunchBatch(Classify<kType>, batch, count, kClassifyThreads, tokens, launch);
  });
  LaunchBatch(Layout<true>, batch, count, kLayoutThreads, one, launch);
  WithSets(jobs->dims.dtype, jobs->dims.head_dim, [&]<DType kType, int kSets>() {
    LaunchBatch(Centre<kType, kSets>, batch, count, kCellThreads, centres, launch);
    LaunchBatch(Encode<kType, kSets>, batch, count, kCellThreads, cells, launch);
  });
}

template <typename Launcher>
void RunDecode(const DecodeJob* jobs, uint32_t count, void* workspace, Launcher& launch) {
  const BatchArgs batch = ArgsOf(jobs, count, workspace);
  const auto one = [](const ChunkArgs&) { return uint64_t{1}; };
  const auto cells = [](const ChunkArgs& args) { return CellThreads(args, args.planes, args.tokens); };
  LaunchBatch(Layout<false>, batch, count, kLayoutThreads, one, launch);
  WithSets(jobs->target, jobs->dims.head_dim, [&]<DType kType, int kSets>() {
    LaunchBatch(Decode<kType, kSets>, batch, count, kCellThreads, cells, launch);
  });
}

// The most tokens that a job has.
template <typename Job>
uint32_t MostTokens(const Job* jobs, uint32_t count) {
  uint32_t most = 0;
  for (uint32_t i = 0; i < count; ++i) most = jobs[i].dims.tokens > most ? jobs[i].dims.tokens : most;
  return most;
}

template <typename Launcher>
void RunScan(const ScanJob* jobs, uint32_t count, Launcher& launch) {
  const PlanesArgs<ScanArgs> args = ArgsOf(jobs, count);
  const uint32_t blocks = BlocksFor(uint64_t{MostTokens(jobs, count)} * kScanLanes, kScanThreads);
  WithDType(jobs->dims.dtype, [&]<DType kType>() { launch(Scan<kType>, blocks, kScanThreads, args, count); });
}

template <typename Launcher>
void RunSpread(const SpreadJob* jobs, uint32_t count, Launcher& launch) {
  const PlanesArgs<SpreadArgs> args = ArgsOf(jobs, count);
  const uint32_t blocks = BlocksFor(MostTokens(jobs, count), kSpreadTokens);
  WithDType(jobs->dims.dtype, [&]<DType kType>() { launch(Spread<kType>, blocks, kSpreadThreads, args, count); });
}

template <typename Launcher>
void RunAttend(const AttendJob& job, void* workspace, Launcher& launch) {
  const AttendPasses passes = PassesOf(job.dims, job.queries);
  for (uint32_t head = 0; head < job.dims.heads; head += passes.heads) {
    for (uint32_t query = 0; query < job.queries; query += passes.queries) {
      const AttendArgs args = ArgsOf(job, workspace, head, query);
      const uint32_t tiles = (args.queries + kAttendQueries - 1) / kAttendQueries;
      WithDType(job.dims.dtype, [&]<DType kType>() {
        launch(Attend<kType>, args.heads * args.blocks * tiles, kAttendThreads, args);
      });
      launch(AttendFactors<kFoldThreads>, BlocksFor(uint64_t{args.heads} * args.queries, kFoldThreads), kFoldThreads, args);
      launch(AttendFold<kFoldThreads>, BlocksFor(uint64_t{args.heads} * args.tokens, kFoldThreads), kFoldThreads, args);
    }
  }
}

template <typename Launcher>
void RunZero(const ZeroJob& job, Launcher& launch) {
  const ZeroArgs args = ArgsOf(job);
  if (args.first_token >= args.tokens) return;
  const uint64_t units = uint64_t{args.tokens - args.first_token} * args.heads * (args.head_dim / kLaneValues);
  WithDType(job.dims.dtype,
            [&]<DType kType>() { launch(Zero<kType>, BlocksFor(units, kZeroThreads), kZeroThreads, args); });
}

}  // namespace spectrumkv::gpu
