// The CPU backends: scalar (the definition), avx2, avx512.
#pragma once

#include "kernels/codec/registry.h"

namespace spectrumkv {

const Backend* ScalarBackend();
const Backend* Avx2Backend();
const Backend* Avx512Backend();

// Adds all three, the fastest last.
void AddCpuBackends(BackendRegistry* registry);

}  // namespace spectrumkv
