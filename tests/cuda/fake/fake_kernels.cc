#include "tests/cuda/fake/fake_kernels.h"

#include <mutex>
#include <utility>

#include "kernels/cuda/jobs.h"
#include "tests/cuda/shim/cuda_shim.h"
// Behind the shim:
#include "kernels/cuda/pipeline.cuh"

namespace spectrumkv::testing {
namespace {

std::mutex shared_memory_mutex;

shim::Launcher LauncherFor(std::vector<shim::Range> memory) {
  return shim::Launcher(shim::Options{shim::Order::kForward, 1, std::move(memory)});
}

}  // namespace

const char* CheckJobs(const std::vector<gpu::EncodeJob>& jobs, const void* workspace, size_t workspace_bytes) {
  return gpu::Check(jobs.data(), static_cast<uint32_t>(jobs.size()), workspace, workspace_bytes);
}
const char* CheckJobs(const std::vector<gpu::DecodeJob>& jobs, const void* workspace, size_t workspace_bytes) {
  return gpu::Check(jobs.data(), static_cast<uint32_t>(jobs.size()), workspace, workspace_bytes);
}
const char* CheckJobs(const std::vector<gpu::ScanJob>& jobs) {
  return gpu::Check(jobs.data(), static_cast<uint32_t>(jobs.size()));
}
const char* CheckJobs(const std::vector<gpu::SpreadJob>& jobs) {
  return gpu::Check(jobs.data(), static_cast<uint32_t>(jobs.size()));
}
const char* CheckJob(const gpu::ZeroJob& job) { return gpu::Check(job); }
const char* CheckJob(const gpu::AttendJob& job, const void* workspace, size_t workspace_bytes) {
  return gpu::Check(job, workspace, workspace_bytes);
}

void RunOnShim(const std::vector<gpu::EncodeJob>& jobs, void* workspace, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunEncode(jobs.data(), static_cast<uint32_t>(jobs.size()), workspace, launch);
}
void RunOnShim(const std::vector<gpu::DecodeJob>& jobs, void* workspace, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunDecode(jobs.data(), static_cast<uint32_t>(jobs.size()), workspace, launch);
}
void RunOnShim(const std::vector<gpu::ScanJob>& jobs, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunScan(jobs.data(), static_cast<uint32_t>(jobs.size()), launch);
}
void RunOnShim(const std::vector<gpu::SpreadJob>& jobs, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunSpread(jobs.data(), static_cast<uint32_t>(jobs.size()), launch);
}
void RunOnShim(const gpu::AttendJob& job, void* workspace, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunAttend(job, workspace, launch);
}
void RunOnShim(const gpu::ZeroJob& job, std::vector<shim::Range> memory) {
  std::lock_guard<std::mutex> lock(shared_memory_mutex);
  shim::Launcher launch = LauncherFor(std::move(memory));
  gpu::RunZero(job, launch);
}

}  // namespace spectrumkv::testing
