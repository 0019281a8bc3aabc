#include "kernels/cuda/jobs.h"

#include <algorithm>

#include "kernels/codec/attend_math.h"
#include "kernels/codec/scan_math.h"
#include "kernels/cuda/tuning.h"

namespace spectrumkv::gpu {
namespace {

bool Aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// In these ranges no kernel counts more than 2^29 threads, which fit in 32 bits.
const char* CheckDims(const ChunkDims& dims, uint32_t most_tokens = kMaxChunkTokens) {
  if (dims.tokens < 1 || dims.tokens > most_tokens) return "dims.tokens";
  if (dims.heads < 1 || dims.heads > kMaxHeads) return "dims.heads";
  if (dims.head_dim < 8 || dims.head_dim > kMaxHeadDim || dims.head_dim % 8 != 0) return "dims.head_dim";
  if (dims.dtype < DType::kFloat16 || dims.dtype > DType::kFloat32) return "dims.dtype";
  return nullptr;
}

const char* CheckPlane(const DevicePlane& plane, const char* name) {
  return plane.base == nullptr || plane.runs == nullptr || plane.run_count == 0 ? name : nullptr;
}

// Of both planes, and of what encode and decode jobs share.
template <typename Job>
const char* CheckChunkJob(const Job& job, const void* workspace, size_t workspace_bytes) {
  if (const char* wrong = CheckDims(job.dims)) return wrong;
  if (const char* wrong = CheckPlane(job.k, "k")) return wrong;
  if (job.dims.has_v && CheckPlane(job.v, "v") != nullptr) return "v";
  if (job.chunk == nullptr || !Aligned(job.chunk, 16)) return "chunk";
  if (job.report == nullptr || !Aligned(job.report, alignof(ChunkReport))) return "report";
  if (workspace == nullptr || !Aligned(workspace, 16)) return "workspace";
  return workspace_bytes < WorkspaceBytes(job.dims) ? "workspace_bytes" : nullptr;
}

const char* CheckOwn(const EncodeJob& job) { return job.tiers == nullptr ? "tiers" : nullptr; }
const char* CheckOwn(const DecodeJob& job) {
  return job.target < DType::kFloat16 || job.target > DType::kFloat32 ? "target" : nullptr;
}

template <typename Job>
const char* CheckBatch(const Job* jobs, uint32_t count, const void* workspace, size_t workspace_bytes) {
  if (jobs == nullptr || count < 1 || count > kMaxBatch) return "count";
  for (uint32_t i = 0; i < count; ++i) {
    if (const char* wrong = CheckChunkJob(jobs[i], workspace, workspace_bytes)) return wrong;
    if (const char* wrong = CheckOwn(jobs[i])) return wrong;
    if (!SameKind(jobs[i], jobs[0])) return "kind";
    workspace_bytes -= WorkspaceBytes(jobs[i].dims);
  }
  return nullptr;
}

const char* CheckOutput(const ScanJob& job) {
  return job.scans == nullptr || !Aligned(job.scans, 2) ? "scans" : nullptr;
}
const char* CheckOutput(const SpreadJob& job) { return job.spreads == nullptr ? "spreads" : nullptr; }

template <typename Job>
const char* CheckPlanes(const Job* jobs, uint32_t count) {
  if (jobs == nullptr || count < 1 || count > kMaxPlanes) return "count";
  for (uint32_t i = 0; i < count; ++i) {
    if (const char* wrong = CheckDims(jobs[i].dims)) return wrong;
    if (const char* wrong = CheckPlane(jobs[i].plane, "plane")) return wrong;
    if (const char* wrong = CheckOutput(jobs[i])) return wrong;
    if (!SameKind(jobs[i], jobs[0])) return "kind";
  }
  return nullptr;
}

ScanArgs PlaneArgsOf(const ScanJob& job) {
  return ScanArgs{job.dims.tokens, job.dims.heads, job.dims.head_dim, job.plane, reinterpret_cast<uint8_t*>(job.scans)};
}

SpreadArgs PlaneArgsOf(const SpreadJob& job) {
  const SpreadSample sample = SpreadSampleOf(job.dims.heads, job.dims.head_dim, job.centred);
  SpreadArgs args{};
  args.tokens = job.dims.tokens;
  args.head_dim = job.dims.head_dim;
  args.sample_heads = sample.heads;
  args.head_step = sample.head_step;
  args.sample_dims = sample.dims;
  args.centred = job.centred ? 1 : 0;
  args.skip = job.skip;
  args.plane = job.plane;
  args.spreads = job.spreads;
  return args;
}

template <typename Args, typename Job>
PlanesArgs<Args> PlanesArgsOf(const Job* jobs, uint32_t count) {
  PlanesArgs<Args> args{};
  for (uint32_t i = 0; i < count; ++i) args.planes[i] = PlaneArgsOf(jobs[i]);
  return args;
}

uint32_t AttendBlocks(uint32_t tokens) { return (tokens + kAttendTokens - 1) / kAttendTokens; }

// Far more than any model has: what keeps a grid's blocks in 31 bits.
constexpr uint32_t kMaxAttendQueries = 1 << 20;

// Sets of eight values that a lane holds of a cell.
uint32_t SetsOf(uint32_t head_dim) {
  constexpr uint32_t kSet = kWarpLanes * kLaneValues;
  return head_dim <= kSet ? 1 : head_dim <= 2 * kSet ? 2 : 4;
}

// The smallest power of two that holds a cell, at most a warp.
uint32_t CellLanes(uint32_t head_dim) {
  const uint32_t units = head_dim / kLaneValues;
  uint32_t lanes = 1;
  while (lanes < units && lanes < kWarpLanes) lanes *= 2;
  return lanes;
}

// Takes the parts of a workspace one after another; from null it measures.
class Parts {
 public:
  explicit Parts(void* workspace) : at_(static_cast<uint8_t*>(workspace)) {}

  template <typename T>
  T* Take(size_t count) {
    T* taken = at_ == nullptr ? nullptr : reinterpret_cast<T*>(at_ + bytes_);
    bytes_ += (count * sizeof(T) + 15) / 16 * 16;
    return taken;
  }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* at_;
  size_t bytes_ = 0;
};

Workspaces Divide(const ChunkDims& dims, Parts* parts) {
  Workspaces work;
  work.chunk = parts->Take<ChunkPlaces>(1);
  work.cells = parts->Take<CellPlace>(size_t{2} * dims.tokens);
  work.nonfinite = parts->Take<uint32_t>(dims.tokens);
  work.escaped = parts->Take<uint8_t>(dims.tokens);
  work.tiers = parts->Take<uint8_t>(dims.tokens);
  return work;
}

struct AttendWork {
  float *weights, *tops, *sums;
};

AttendWork Divide(const ChunkDims& dims, const AttendPasses& passes, Parts* parts) {
  const size_t rows = size_t{AttendBlocks(dims.tokens)} * passes.heads * passes.queries;
  return AttendWork{parts->Take<float>(rows * kAttendTokens), parts->Take<float>(rows), parts->Take<float>(rows)};
}

template <typename Job>
ChunkArgs ChunkArgsOf(const Job& job, void* workspace) {
  ChunkArgs args{};
  args.tokens = job.dims.tokens;
  args.heads = job.dims.heads;
  args.head_dim = job.dims.head_dim;
  args.rotation = RotationOf(job.dims.head_dim);
  args.planes = job.dims.has_v ? 2 : 1;
  args.cell_lanes = CellLanes(job.dims.head_dim);
  args.dtype = job.dims.dtype;
  args.k = job.k;
  args.v = job.dims.has_v ? job.v : job.k;
  args.report = job.report;
  Parts parts(workspace);
  args.work = Divide(job.dims, &parts);
  return args;
}

void AddOwn(const EncodeJob& job, ChunkArgs* args) {
  args->requested = job.tiers;
  args->chunk = job.chunk;
  args->capacity = job.capacity;
}
void AddOwn(const DecodeJob& job, ChunkArgs* args) {
  args->chunk = const_cast<uint8_t*>(job.chunk);  // kernels of decoding only read it
}

template <typename Job>
BatchArgs BatchArgsOf(const Job* jobs, uint32_t count, void* workspace) {
  BatchArgs batch{};
  auto* at = static_cast<uint8_t*>(workspace);
  for (uint32_t i = 0; i < count; ++i) {
    batch.chunks[i] = ChunkArgsOf(jobs[i], at);
    AddOwn(jobs[i], &batch.chunks[i]);
    at += WorkspaceBytes(jobs[i].dims);
  }
  return batch;
}

}  // namespace

size_t WorkspaceBytes(const ChunkDims& dims) {
  Parts parts(nullptr);
  Divide(dims, &parts);
  return parts.bytes();
}

bool SameKind(const EncodeJob& a, const EncodeJob& b) {
  return a.dims.dtype == b.dims.dtype && SetsOf(a.dims.head_dim) == SetsOf(b.dims.head_dim);
}

bool SameKind(const DecodeJob& a, const DecodeJob& b) {
  return a.target == b.target && SetsOf(a.dims.head_dim) == SetsOf(b.dims.head_dim);
}

const char* Check(const EncodeJob* jobs, uint32_t count, const void* workspace, size_t workspace_bytes) {
  return CheckBatch(jobs, count, workspace, workspace_bytes);
}

const char* Check(const DecodeJob* jobs, uint32_t count, const void* workspace, size_t workspace_bytes) {
  return CheckBatch(jobs, count, workspace, workspace_bytes);
}

const char* Check(const ScanJob* jobs, uint32_t count) { return CheckPlanes(jobs, count); }
const char* Check(const SpreadJob* jobs, uint32_t count) { return CheckPlanes(jobs, count); }

const char* Check(const ZeroJob& job) {
  if (const char* wrong = CheckDims(job.dims)) return wrong;
  return CheckPlane(job.plane, "plane");
}

BatchArgs ArgsOf(const EncodeJob* jobs, uint32_t count, void* workspace) { return BatchArgsOf(jobs, count, workspace); }
BatchArgs ArgsOf(const DecodeJob* jobs, uint32_t count, void* workspace) { return BatchArgsOf(jobs, count, workspace); }

PlanesArgs<ScanArgs> ArgsOf(const ScanJob* jobs, uint32_t count) { return PlanesArgsOf<ScanArgs>(jobs, count); }
PlanesArgs<SpreadArgs> ArgsOf(const SpreadJob* jobs, uint32_t count) { return PlanesArgsOf<SpreadArgs>(jobs, count); }

ZeroArgs ArgsOf(const ZeroJob& job) {
  return ZeroArgs{job.first_token, job.dims.tokens, job.dims.heads, job.dims.head_dim, job.plane};
}

const char* Check(const AttendJob& job, const void* workspace, size_t workspace_bytes) {
  if (const char* wrong = CheckDims(job.dims, kMaxAttendTokens)) return wrong;
  if (const char* wrong = CheckPlane(job.k, "k")) return wrong;
  if (job.queries == 0 || job.queries > kMaxAttendQueries) return "queries";
  if (job.values == nullptr || !Aligned(job.values, 16)) return "values";
  if (job.positions == nullptr || !Aligned(job.positions, 4)) return "positions";
  if (!(job.soft_cap >= 0)) return "soft_cap";
  if (job.scores == nullptr || !Aligned(job.scores, 4)) return "scores";
  if (workspace == nullptr || !Aligned(workspace, 16)) return "workspace";
  return workspace_bytes < AttendWorkspaceBytes(job.dims, job.queries) ? "workspace_bytes" : nullptr;
}

AttendPasses PassesOf(const ChunkDims& dims, uint32_t queries) {
  const uint64_t tile_bytes = uint64_t{std::max(1u, AttendBlocks(dims.tokens))} * kAttendQueries * kAttendTokens * sizeof(float);
  const uint64_t tiles = std::max<uint64_t>(1, kAttendWorkBytes / tile_bytes);
  const uint64_t of_head = (uint64_t{queries} + kAttendQueries - 1) / kAttendQueries;
  const uint64_t taken = std::min(tiles, of_head);
  return AttendPasses{static_cast<uint32_t>(std::min<uint64_t>(dims.heads, tiles / taken)),
                      static_cast<uint32_t>(taken * kAttendQueries)};
}

size_t AttendWorkspaceBytes(const ChunkDims& dims, uint32_t queries) {
  Parts parts(nullptr);
  Divide(dims, PassesOf(dims, queries), &parts);
  return parts.bytes();
}

AttendArgs ArgsOf(const AttendJob& job, void* workspace, uint32_t head_first, uint32_t query_first) {
  const AttendPasses passes = PassesOf(job.dims, job.queries);
  Parts parts(workspace);
  const AttendWork work = Divide(job.dims, passes, &parts);
  AttendArgs args{};
  args.tokens = job.dims.tokens;
  args.head_dim = job.dims.head_dim;
  args.blocks = AttendBlocks(job.dims.tokens);
  args.head_first = head_first;
  args.heads = std::min(passes.heads, job.dims.heads - head_first);
  args.query_first = query_first;
  args.queries = std::min(passes.queries, job.queries - query_first);
  args.query_count = job.queries;
  args.window = job.window;
  args.soft_cap = job.soft_cap;
  args.inverse_cap = job.soft_cap == 0.0f ? 0.0f : 1.0f / job.soft_cap;
  args.plane = job.k;
  args.values = job.values;
  args.positions = job.positions;
  args.weights = work.weights;
  args.tops = work.tops;
  args.sums = work.sums;
  args.scores = job.scores;
  return args;
}

uint32_t BlocksFor(uint64_t work_items, uint32_t threads) {
  return static_cast<uint32_t>((work_items + threads - 1) / threads);
}

uint32_t RunsOf(const uint8_t* const* rows, uint32_t tokens, const uint8_t* base, int64_t token_stride_bytes,
                TokenRun* runs) {
  uint32_t count = 0;
  for (uint32_t t = 0; t < tokens; ++t) {
    const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows[t]) - reinterpret_cast<uintptr_t>(base));
    if (t != 0) {
      const TokenRun& last = runs[count - 1];
      if (offset == last.offset_bytes + int64_t{t - last.first_token} * token_stride_bytes) continue;
    }
    runs[count++] = TokenRun{offset, t, 0};
  }
  return count;
}

}  // namespace spectrumkv::gpu
