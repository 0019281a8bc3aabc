// The scanning half of TableBackend.
#include <algorithm>
#include <cstring>

#include "kernels/codec/escapes.h"
#include "kernels/codec/scan_math.h"
#include "kernels/codec/table_backend.h"
#include "kernels/codec/token_reader.h"

namespace spectrumkv {

void GatherHead(const uint8_t* from, int64_t stride_bytes, uint32_t head_dim, size_t word_bytes, uint8_t* to) {
  for (uint32_t d = 0; d < head_dim; ++d, from += stride_bytes, to += word_bytes) {
    if (word_bytes == 2) {
      std::memcpy(to, from, 2);
    } else {
      std::memcpy(to, from, 4);
    }
  }
}

void TableBackend::Scan(const ChunkDims& dims, const SourcePlane& plane, TokenScan* out) const {
  const EscapeLimits limits = EscapeLimitsOf(dims.dtype);
  const size_t word = SizeOf(dims.dtype);
  const bool strided = plane.dim_stride_bytes != static_cast<int64_t>(word);
  alignas(64) uint8_t gathered[kMaxHeadDim * sizeof(float)];
  const uint8_t* const gathered_row = gathered;
  alignas(64) float lanes[kEnergyLanes];
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    uint32_t magnitude = 0;
    float energy = 0.0f;
    if (!strided) {
      magnitude = ops_.energy(CellsIn{plane.rows + t, 1, dims.tokens - t - 1, plane.head_stride_bytes, dims.heads,
                                      dims.head_dim, dims.dtype},
                              nullptr, &energy);
    } else {
      std::fill_n(lanes, kEnergyLanes, 0.0f);
    }
    for (uint32_t h = 0; strided && h < dims.heads; ++h) {
      GatherHead(plane.rows[t] + h * plane.head_stride_bytes, plane.dim_stride_bytes, dims.head_dim, word, gathered);
      const CellsIn head{&gathered_row, 1, 0, 0, 1, dims.head_dim, dims.dtype};
      magnitude = std::max(magnitude, ops_.energy(head, lanes, &energy));
    }
    out[t].escape = ClassOf(magnitude, limits);
    out[t].energy_log2 = out[t].escape == kEscapeNonFinite ? 255 : EnergyLog2(energy);
  }
}

}  // namespace spectrumkv
