#include "tests/unit/memory/failing_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <utility>

namespace spectrumkv {
namespace {

std::atomic<int64_t> mappings{0}, mapped_bytes{0};

MemoryFault& Fault() {
  static auto* const fault = new MemoryFault;
  return *fault;
}

bool Fails(MemoryCall call) {
  const int error = Fault() ? Fault()(call) : 0;
  if (error != 0) errno = error;
  return error != 0;
}

}  // namespace

void SetMemoryFault(MemoryFault fault) { Fault() = std::move(fault); }
int64_t LiveMappings() { return mappings; }
int64_t LiveMappedBytes() { return mapped_bytes; }

int OpenFiles() {
  DIR* folder = opendir("/proc/self/fd");
  int files = 0;
  while (folder != nullptr && readdir(folder) != nullptr) ++files;
  if (folder != nullptr) closedir(folder);
  return files - 3;  // ".", ".." and the folder itself
}

}  // namespace spectrumkv

// What --wrap makes of the calls. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {

void* __real_mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, size_t length);
int __real_madvise(void* address, size_t length, int advice);
int __real_open(const char* name, int flags, mode_t mode);
long __real_syscall(long number, long a, long b, long c, long d, long e, long f);
int __real_fstat(int fd, struct stat* info);

void* __wrap_mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  if (spectrumkv::Fails(spectrumkv::MemoryCall::kMap)) return MAP_FAILED;
  void* const mapped = __real_mmap(address, length, protection, flags, fd, offset);
  if (mapped != MAP_FAILED && (flags & MAP_FIXED) == 0) {
    ++spectrumkv::mappings;
    spectrumkv::mapped_bytes += static_cast<int64_t>(length);
  }
  return mapped;
}

int __wrap_munmap(void* address, size_t length) {
  --spectrumkv::mappings;
  spectrumkv::mapped_bytes -= static_cast<int64_t>(length);
  return __real_munmap(address, length);
}

int __wrap_madvise(void* address, size_t length, int advice) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; headers before Linux 5.14 do not have it
  if (advice == kPopulateWrite && spectrumkv::Fails(spectrumkv::MemoryCall::kPopulate)) return -1;
  return __real_madvise(address, length, advice);
}

// These two are variadic; a caller that gives fewer arguments leaves the others as they are, and nobody reads them.
int __wrap_open(const char* name, int flags, mode_t mode) {
  return spectrumkv::Fails(spectrumkv::MemoryCall::kOpen) ? -1 : __real_open(name, flags, mode);
}

long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == SYS_openat2 && spectrumkv::Fails(spectrumkv::MemoryCall::kOpenat2)) return -1;
  return __real_syscall(number, a, b, c, d, e, f);
}

int __wrap_fstat(int fd, struct stat* info) {
  return spectrumkv::Fails(spectrumkv::MemoryCall::kStat) ? -1 : __real_fstat(fd, info);
}

}  // NOLINTEND(bugprone-reserved-identifier)
