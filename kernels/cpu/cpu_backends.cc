#include "kernels/cpu/cpu_backends.h"

#include "kernels/codec/table_backend.h"

namespace spectrumkv {

const Backend* ScalarBackend() {
  static const TableBackend backend(ScalarCellOps(), true);
  return &backend;
}

const Backend* Avx2Backend() { return ScalarBackend(); }
const Backend* Avx512Backend() { return ScalarBackend(); }

void AddCpuBackends(BackendRegistry* registry) { registry->Add(ScalarBackend()); }

}  // namespace spectrumkv
