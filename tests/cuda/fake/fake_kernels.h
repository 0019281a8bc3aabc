// The kernels on the shim, one job at a time in the process: their shared memory is static.
#pragma once

#include <vector>

#include "kernels/cuda/codec.h"
#include "tests/cuda/shim/block.h"

namespace spectrumkv::testing {

// As kernels/cuda/jobs.h: the name of the field that is wrong, or null.
const char* CheckJobs(const std::vector<gpu::EncodeJob>& jobs, const void* workspace, size_t workspace_bytes);
const char* CheckJobs(const std::vector<gpu::DecodeJob>& jobs, const void* workspace, size_t workspace_bytes);
const char* CheckJobs(const std::vector<gpu::ScanJob>& jobs);
const char* CheckJobs(const std::vector<gpu::SpreadJob>& jobs);
const char* CheckJob(const gpu::ZeroJob& job);
const char* CheckJob(const gpu::AttendJob& job, const void* workspace, size_t workspace_bytes);

// Throw shim::Fault. The kernels may touch `memory` and nothing else.
void RunOnShim(const std::vector<gpu::EncodeJob>& jobs, void* workspace, std::vector<shim::Range> memory);
void RunOnShim(const std::vector<gpu::DecodeJob>& jobs, void* workspace, std::vector<shim::Range> memory);
void RunOnShim(const std::vector<gpu::ScanJob>& jobs, std::vector<shim::Range> memory);
void RunOnShim(const std::vector<gpu::SpreadJob>& jobs, std::vector<shim::Range> memory);
void RunOnShim(const gpu::ZeroJob& job, std::vector<shim::Range> memory);
void RunOnShim(const gpu::AttendJob& job, void* workspace, std::vector<shim::Range> memory);

}  // namespace spectrumkv::testing
