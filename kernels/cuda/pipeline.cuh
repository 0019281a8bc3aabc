// The order and the shape of launches: which kernels make up a job. `Launcher` runs one kernel:
//   launch(kernel, blocks, threads, args)
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

template <typename Launcher>
void RunEncode(const EncodeJob& job, void* workspace, Launcher& launch) {
  const ChunkArgs args = ArgsOf(job, workspace);
  const uint64_t cell_threads = static_cast<uint64_t>(args.heads) * args.cell_lanes;
  const uint32_t runs = (args.tokens + kCentreTokens - 1) / kCentreTokens;
  WithDType(args.dtype, [&]<DType kType>() {
    launch(Classify<kType>, BlocksFor(uint64_t{args.tokens} * kWarpLanes, kClassifyThreads), kClassifyThreads, args);
  });
  launch(Layout<true>, 1, kLayoutThreads, args);
  WithSets(args.dtype, args.head_dim, [&]<DType kType, int kSets>() {
    launch(Centre<kType, kSets>, BlocksFor(runs * cell_threads, kCellThreads), kCellThreads, args);
    launch(Encode<kType, kSets>, BlocksFor(uint64_t{args.planes} * args.tokens * cell_threads, kCellThreads),
           kCellThreads, args);
  });
}

template <typename Launcher>
void RunDecode(const DecodeJob& job, void* workspace, Launcher& launch) {
  const ChunkArgs args = ArgsOf(job, workspace);
  const uint64_t threads = uint64_t{args.planes} * args.tokens * args.heads * args.cell_lanes;
  launch(Layout<false>, 1, kLayoutThreads, args);
  WithSets(job.target, args.head_dim, [&]<DType kType, int kSets>() {
    launch(Decode<kType, kSets>, BlocksFor(threads, kCellThreads), kCellThreads, args);
  });
}

template <typename Launcher>
void RunScan(const ScanJob& job, Launcher& launch) {
  const ScanArgs args = ArgsOf(job);
  WithDType(job.dims.dtype, [&]<DType kType>() {
    launch(Scan<kType>, BlocksFor(uint64_t{args.tokens} * kScanLanes, kScanThreads), kScanThreads, args);
  });
}

template <typename Launcher>
void RunSpread(const SpreadJob& job, Launcher& launch) {
  const SpreadArgs args = ArgsOf(job);
  WithDType(job.dims.dtype, [&]<DType kType>() {
    launch(Spread<kType>, BlocksFor(args.tokens, kSpreadTokens), kSpreadThreads, args);
  });
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
