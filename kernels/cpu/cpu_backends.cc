#include "kernels/cpu/cpu_backends.h"

#include "kernels/codec/table_backend.h"

namespace spectrumkv {

const Backend* ScalarBackend() {
  static const TableBackend backend(ScalarCellOps(), true);
  return &backend;
}

const Backend* Avx2Backend() {
  static const CellOps ops = [] {
    CellOps named = ScalarCellOps();
    named.name = "avx2";
    return named;
  }();
  static const TableBackend backend(ops, false);
  return &backend;
}

const Backend* Avx512Backend() {
  static const CellOps ops = [] {
    CellOps named = ScalarCellOps();
    named.name = "avx512";
    return named;
  }();
  static const TableBackend backend(ops, false);
  return &backend;
}

void AddCpuBackends(BackendRegistry* registry) {
  for (const Backend* backend : {ScalarBackend(), Avx2Backend(), Avx512Backend()}) registry->Add(backend);
}

}  // namespace spectrumkv
