// What one core of this machine can move, measured in the same run as what is compared with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv::bench {

// CPU seconds of the calling thread.
double ThreadSeconds();

// Calls work() until `budget_s` is used, at least three times; the least CPU seconds of a call.
template <typename Work>
double BestSeconds(double budget_s, const Work& work) {
  double best_s = 1e300, used_s = 0;
  for (int run = 0; run < 3 || (used_s < budget_s && run < 10000); ++run) {
    const double begin_s = ThreadSeconds();
    work();
    const double took_s = ThreadSeconds() - begin_s;
    used_s += took_s;
    if (took_s < best_s) best_s = took_s;
  }
  return best_s;
}

// GB/s (1e9) by the bytes of the larger side.
struct MemoryLimits {
  double memcpy_gbs = 0;
  double read_gbs = 0;         // read only
  double read2_write1_gbs = 0;  // reads two bytes for each it writes, as an encoder to 8 bits does; bytes read
  double read1_write2_gbs = 0;  // the reverse; bytes written
  double crc32c_gbs = 0;
};

// `bytes` on the larger side.
MemoryLimits MeasureMemoryLimits(size_t bytes, double budget_s);

}  // namespace spectrumkv::bench
