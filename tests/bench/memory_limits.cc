#include "tests/bench/memory_limits.h"

#include <time.h>

#include <cstring>
#include <vector>

#include "kernels/format/crc32c.h"

namespace spectrumkv::bench {
namespace {

// Sixteen bytes, in the compiler's vectors; aligned(1): memory of any alignment.
typedef uint64_t Vector __attribute__((vector_size(16), aligned(1), may_alias));

volatile uint64_t sink;

void ReadAll(const uint8_t* from, size_t bytes) {
  const Vector* in = reinterpret_cast<const Vector*>(from);
  Vector a{}, b{}, c{}, d{};
  for (size_t i = 0; i + 4 <= bytes / 16; i += 4) {
    a ^= in[i];
    b ^= in[i + 1];
    c ^= in[i + 2];
    d ^= in[i + 3];
  }
  a ^= b ^ c ^ d;
  sink = a[0] ^ a[1];
}

void Read2Write1(const uint8_t* from, uint8_t* to, size_t bytes) {
  const Vector* in = reinterpret_cast<const Vector*>(from);
  Vector* out = reinterpret_cast<Vector*>(to);
  for (size_t i = 0; i + 4 <= bytes / 16; i += 4) {
    out[i / 2] = in[i] ^ in[i + 1];
    out[i / 2 + 1] = in[i + 2] ^ in[i + 3];
  }
}

void Read1Write2(const uint8_t* from, uint8_t* to, size_t bytes) {
  const Vector* in = reinterpret_cast<const Vector*>(from);
  Vector* out = reinterpret_cast<Vector*>(to);
  for (size_t i = 0; i + 4 <= bytes / 16; i += 4) {
    const Vector a = in[i / 2], b = in[i / 2 + 1];
    out[i] = a;
    out[i + 1] = a + 1;
    out[i + 2] = b;
    out[i + 3] = b + 1;
  }
}

}  // namespace

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

MemoryLimits MeasureMemoryLimits(size_t bytes, double budget_s) {
  std::vector<uint8_t> a(bytes, 1), b(bytes, 2);
  const double gb = static_cast<double>(bytes) * 1e-9;
  MemoryLimits limits;
  limits.memcpy_gbs = gb / BestSeconds(budget_s, [&] { std::memcpy(b.data(), a.data(), bytes); });
  limits.read_gbs = gb / BestSeconds(budget_s, [&] { ReadAll(a.data(), bytes); });
  limits.read2_write1_gbs = gb / BestSeconds(budget_s, [&] { Read2Write1(a.data(), b.data(), bytes); });
  limits.read1_write2_gbs = gb / BestSeconds(budget_s, [&] { Read1Write2(a.data(), b.data(), bytes); });
  limits.crc32c_gbs = gb / BestSeconds(budget_s, [&] { sink = Crc32c(0, a.data(), bytes); });
  return limits;
}

}  // namespace spectrumkv::bench
