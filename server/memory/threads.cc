#include "server/memory/threads.h"

#include <pthread.h>
#include <sys/resource.h>

#include <fstream>
#include <latch>
#include <string>
#include <vector>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

void* WaitFor(void* latch) {
  static_cast<std::latch*>(latch)->wait();
  return nullptr;
}

std::string ProcessLimit() {
  struct rlimit limit = {};
  if (getrlimit(RLIMIT_NPROC, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur);
}

std::string CgroupLimit() {
  std::ifstream file("/sys/fs/cgroup/pids.max");
  std::string text;
  return file >> text ? text : "unknown";
}

}  // namespace

absl::Status CheckThreads(size_t count) {
  std::latch go(1);
  std::vector<pthread_t> threads;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, size_t{64} << 10);
  pthread_t thread = {};
  while (threads.size() < count && pthread_create(&thread, &attributes, WaitFor, &go) == 0) threads.push_back(thread);
  const size_t got = threads.size();
  pthread_attr_destroy(&attributes);
  go.count_down();
  for (const pthread_t& started : threads) pthread_join(started, nullptr);
  if (got == count) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "OUT_OF_THREADS",
                   "the daemon needs " + std::to_string(count) + " threads (fewer with a smaller codec.threads), the system gives " +
                       std::to_string(got) + ": RLIMIT_NPROC is " + ProcessLimit() + ", pids.max of the cgroup " +
                       CgroupLimit(),
                   {{"needed", std::to_string(count)},
                    {"available", std::to_string(got)},
                    {"rlimit_nproc", ProcessLimit()},
                    {"cgroup_pids_max", CgroupLimit()}});
}

}  // namespace spectrumkv
