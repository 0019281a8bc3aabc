// The host's part of a job, apart from launching: checks, the parts of the workspace, kernel arguments. Internal to
// kernels/cuda.
#pragma once

#include "kernels/cuda/args.h"

namespace spectrumkv::gpu {

// What is wrong with a job, by the name of the field, or null.
const char* Check(const EncodeJob& job, const void* workspace, size_t workspace_bytes);
const char* Check(const DecodeJob& job, const void* workspace, size_t workspace_bytes);
const char* Check(const ScanJob& job);
const char* Check(const SpreadJob& job);
const char* Check(const ZeroJob& job);

// REQUIRES: checked.
ChunkArgs ArgsOf(const EncodeJob& job, void* workspace);
ChunkArgs ArgsOf(const DecodeJob& job, void* workspace);
ScanArgs ArgsOf(const ScanJob& job);
SpreadArgs ArgsOf(const SpreadJob& job);
ZeroArgs ArgsOf(const ZeroJob& job);

uint32_t BlocksFor(uint64_t work_items, uint32_t threads);

}  // namespace spectrumkv::gpu
