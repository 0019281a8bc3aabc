// The codec on a GPU: encodes, decodes and scans what lies in device memory, byte for byte as the scalar backend does
// (kernels/codec/backend.h, proto/WIRE_FORMAT.md). Plain C++, so that callers need no CUDA header.
//
// Habits of every Launch function: the caller asks for the workspace's size first and brings the memory; the work is
// queued on the caller's stream; nothing is allocated, and the host waits for nothing. Arguments are looked at by the
// host, and what is wrong with them is in the status; what the device finds is in the report, to be read once the
// stream has passed. Everything a job points to lies in device memory (or in host memory that the device can reach),
// belongs to the caller and stays until then. Any thread may call, jobs of one stream run in order, a workspace serves
// one job at a time.
//
// What the host does: a chunk's header and CRC32C are made after the copy to host memory (SealChunk in
// kernels/codec/chunk_head.h), and a received chunk is checked in host memory (ParseChunk in kernels/format/chunk.h)
// before it is copied to the device: the verdict on a malformed chunk is the host's, and the device decodes only what
// passed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec/backend.h"
#include "kernels/format/chunk.h"

struct CUstream_st;

namespace spectrumkv::gpu {

using Stream = CUstream_st*;  // cudaStream_t

// Tokens that follow each other at the plane's token stride: a page of a paged cache, or several that lie together.
struct TokenRun {
  int64_t offset_bytes = 0;  // of the run's first token, from the plane's base
  uint32_t first_token = 0;  // index in the chunk
  uint32_t reserved = 0;
};

// [tokens, heads, head_dim] in paged memory. Value d of head h of token t, which lies in run r, is at
//   base + runs[r].offset_bytes + (t - runs[r].first_token) * token_stride_bytes + h * head_stride_bytes
//        + d * dim_stride_bytes
// NHD and HND, K and V fused or split, differ in these numbers alone. Any alignment is right. Fast, by 128-bit
// accesses: dim_stride_bytes == SizeOf(dtype), and base, offsets and strides are multiples of 16.
struct DevicePlane {
  uint8_t* base = nullptr;         // written by decoding and zeroing only
  const TokenRun* runs = nullptr;  // [run_count], by first_token, which is 0 in the first
  uint32_t run_count = 0;
  int64_t token_stride_bytes = 0;
  int64_t head_stride_bytes = 0;
  int64_t dim_stride_bytes = 0;
};

// Fills runs[tokens] (host memory) with the fewest runs for tokens at these addresses; returns how many.
uint32_t RunsOf(const uint8_t* const* rows, uint32_t tokens, const uint8_t* base, int64_t token_stride_bytes,
                TokenRun* runs);

// What the device tells of one job. In device memory; whole once the stream has passed the job.
struct ChunkReport {
  uint64_t chunk_bytes = 0;  // as EncodeResult: 0 where the chunk did not fit the capacity
  uint64_t nonfinite_values = 0;
  uint64_t rounded_words = 0;  // as DecodeResult
  uint32_t escaped = 0;
  uint32_t reserved = 0;
};

struct EncodeJob {
  ChunkDims dims;
  DevicePlane k, v;                // v: REQUIRED where dims.has_v, else unused
  const uint8_t* tiers = nullptr;  // [tokens], the tier map asked for
  uint8_t* chunk = nullptr;        // 16-byte aligned; its first 64 bytes, the header, are not written
  uint64_t capacity = 0;           // MaxChunkBytes(dims) is always enough
  ChunkReport* report = nullptr;
};

struct DecodeJob {
  ChunkDims dims;                  // of the chunk
  const uint8_t* chunk = nullptr;  // in one piece, 16-byte aligned, checked by ParseChunk
  DType target = DType::kFloat16;
  DevicePlane k, v;
  ChunkReport* report = nullptr;
};

// Jobs that one launch takes: of one kind, so that one kernel does for all.
constexpr uint32_t kMaxBatch = 8;
bool SameKind(const EncodeJob& a, const EncodeJob& b);
bool SameKind(const DecodeJob& a, const DecodeJob& b);

// Planes that one launch reads: both of each chunk of a batch. Of one data type, so that one kernel does for all.
constexpr uint32_t kMaxPlanes = 2 * kMaxBatch;

// One read pass over one plane, for importance by key norms: energies and escape classes as Backend::Scan.
struct ScanJob {
  ChunkDims dims;
  DevicePlane plane;
  TokenScan* scans = nullptr;  // [tokens]
};

// A sample of one plane, for the planner that weighs errors: as Backend::Spread.
struct SpreadJob {
  ChunkDims dims;
  DevicePlane plane;
  bool centred = false;
  uint32_t skip = 0;           // first tokens that are left out of the mean
  uint8_t* spreads = nullptr;  // [tokens]
};

inline bool SameKind(const ScanJob& a, const ScanJob& b) { return a.dims.dtype == b.dims.dtype; }
inline bool SameKind(const SpreadJob& a, const SpreadJob& b) { return a.dims.dtype == b.dims.dtype; }

// What queries attend to in K, for importance by recent queries: scores as Backend::Attend for each head.
// dims.tokens: up to kMaxAttendTokens, the keys that are there.
struct AttendJob {
  ChunkDims dims;
  DevicePlane k;
  const float* values = nullptr;        // [heads, queries, head_dim], softmax scale applied; 16-byte aligned
  const uint32_t* positions = nullptr;  // [queries], the same for all heads
  uint32_t queries = 0;                 // that read one head
  uint32_t window = 0;                  // as AttendQueries
  float soft_cap = 0;
  float* scores = nullptr;  // [heads, tokens]
};
constexpr uint32_t kMaxAttendTokens = 1 << 26;

// Zeroes tokens [first_token, tokens) of a plane: the unused rest of the last page.
struct ZeroJob {
  ChunkDims dims;
  DevicePlane plane;
  uint32_t first_token = 0;
};

// ok(), or the name of what is wrong: a field of the job, or the CUDA call that failed with `error`.
struct LaunchStatus {
  const char* wrong = nullptr;
  int error = 0;  // cudaError_t
  bool ok() const { return wrong == nullptr; }
};

// Bytes of the workspace of one encode or decode job; it must be 16-byte aligned.
size_t WorkspaceBytes(const ChunkDims& dims);

// Four kernels, and two, for 1 to kMaxBatch jobs of one kind. Their workspaces follow each other, WorkspaceBytes of each.
LaunchStatus LaunchEncode(const EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes, Stream stream);
LaunchStatus LaunchDecode(const DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes, Stream stream);
// One kernel, for 1 to kMaxPlanes jobs of one data type.
LaunchStatus LaunchScan(const ScanJob* jobs, uint32_t count, Stream stream);
LaunchStatus LaunchSpread(const SpreadJob* jobs, uint32_t count, Stream stream);
// Of an attend job; it must be 16-byte aligned. About 16 MiB, more from 131,000 tokens on.
size_t AttendWorkspaceBytes(const ChunkDims& dims, uint32_t queries);
LaunchStatus LaunchAttend(const AttendJob& job, void* workspace, size_t workspace_bytes, Stream stream);
LaunchStatus LaunchZero(const ZeroJob& job, Stream stream);

// The devices this process could use, asked of the driver; without a driver or a device: 0, and why in words.
struct DeviceCount {
  int devices = 0;
  const char* why_none = "";
};
DeviceCount CountDevices();

}  // namespace spectrumkv::gpu
