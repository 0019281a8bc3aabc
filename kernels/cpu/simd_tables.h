// The tables of the files compiled for an instruction set. Reading one needs no such instruction; calling it does.
#pragma once

#include "kernels/codec/cell_ops.h"

namespace spectrumkv {

extern const CellOps kAvx2CellOps;    // REQUIRES AVX2, FMA, F16C
extern const CellOps kAvx512CellOps;  // REQUIRES AVX-512 F, BW, DQ, VL, and FMA, F16C

}  // namespace spectrumkv
