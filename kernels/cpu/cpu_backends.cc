#include "kernels/cpu/cpu_backends.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/codec/table_backend.h"
#include "kernels/cpu/simd_tables.h"

namespace spectrumkv {
namespace {

#if defined(__x86_64__)
// Asked of the CPU itself: clang 14 does not know "f16c".
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c(); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool HasAvx2() { return false; }
bool HasAvx512() { return false; }
#endif

}  // namespace

const Backend* ScalarBackend() {
  static const TableBackend backend(ScalarCellOps(), true);
  return &backend;
}

const Backend* Avx2Backend() {
  static const TableBackend backend(kAvx2CellOps, HasAvx2());
  return &backend;
}

const Backend* Avx512Backend() {
  static const TableBackend backend(kAvx512CellOps, HasAvx512());
  return &backend;
}

void AddCpuBackends(BackendRegistry* registry) {
  for (const Backend* backend : {ScalarBackend(), Avx2Backend(), Avx512Backend()}) registry->Add(backend);
}

}  // namespace spectrumkv
