// Memory as a seam: the calls by which the daemon gets memory and segments, of which a test may let some fail. They are
// wrapped when the test is linked (spectrumkv_failing_memory in CMakeLists.txt), so that product code knows nothing of it.
#pragma once

#include <cerrno>
#include <cstdint>
#include <functional>

namespace spectrumkv {

enum class MemoryCall {
  kMap,       // mmap
  kPopulate,  // madvise(MADV_POPULATE_WRITE)
  kOpen,      // open, of the directory that holds the segment
  kOpenat2,   // openat2
  kStat       // fstat
};

// The errno a call fails with; 0: it goes through. One for the process, empty at first; not while other threads call.
using MemoryFault = std::function<int(MemoryCall)>;
void SetMemoryFault(MemoryFault fault);

// What was mapped and not unmapped since, by code that is linked into this program.
int64_t LiveMappings();
int64_t LiveMappedBytes();

// Files that this process has open.
int OpenFiles();

}  // namespace spectrumkv
