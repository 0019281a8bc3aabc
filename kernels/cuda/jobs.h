// The host's part of a job, apart from launching: checks, the parts of the workspace, kernel arguments. Internal to
// kernels/cuda.
#pragma once

#include "kernels/cuda/args.h"

namespace spectrumkv::gpu {

// What is wrong with a job, by the name of the field, or null.
const char* Check(const EncodeJob* jobs, uint32_t count, const void* workspace, size_t workspace_bytes);
const char* Check(const DecodeJob* jobs, uint32_t count, const void* workspace, size_t workspace_bytes);
const char* Check(const ScanJob* jobs, uint32_t count);
const char* Check(const SpreadJob* jobs, uint32_t count);
const char* Check(const ZeroJob& job);
const char* Check(const AttendJob& job, const void* workspace, size_t workspace_bytes);

// REQUIRES: checked.
BatchArgs ArgsOf(const EncodeJob* jobs, uint32_t count, void* workspace);
BatchArgs ArgsOf(const DecodeJob* jobs, uint32_t count, void* workspace);
PlanesArgs<ScanArgs> ArgsOf(const ScanJob* jobs, uint32_t count);
PlanesArgs<SpreadArgs> ArgsOf(const SpreadJob* jobs, uint32_t count);
ZeroArgs ArgsOf(const ZeroJob& job);

// How a job is cut into passes: heads and queries that are taken at a time, the latter a multiple of kAttendQueries.
struct AttendPasses {
  uint32_t heads, queries;
};
AttendPasses PassesOf(const ChunkDims& dims, uint32_t queries);
// The pass that begins with this head and this query.
AttendArgs ArgsOf(const AttendJob& job, void* workspace, uint32_t head_first, uint32_t query_first);

uint32_t BlocksFor(uint64_t work_items, uint32_t threads);

}  // namespace spectrumkv::gpu
