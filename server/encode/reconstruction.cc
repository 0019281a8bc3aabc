#include "server/encode/reconstruction.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/codec/codec_math.h"

namespace spectrumkv {
namespace {

float ValueAt(const uint8_t* at, DType dtype) {
  uint32_t word = 0;
  std::memcpy(&word, at, SizeOf(dtype));  // little-endian
  switch (dtype) {
    case DType::kFloat16: return HalfToFloat(word);
    case DType::kBFloat16: return BfloatToFloat(word);
    case DType::kFloat32: return BitsFloat(word);
  }
  return 0;
}

struct Sums {
  double squares = 0, error_squares = 0;
  bool any = false;
};
using TierSums = std::array<Sums, kTierCount>;

// `decoded` is dense [tokens, heads, head_dim].
template <DType dtype>
void AddToken(const ChunkDims& dims, const uint8_t* row, const SourcePlane& plane, const uint8_t* decoded, Sums* sums) {
  double squares = 0, error_squares = 0;
  for (uint32_t h = 0; h < dims.heads; ++h) {
    const uint8_t* at = row + static_cast<int64_t>(h) * plane.head_stride_bytes;
    for (uint32_t d = 0; d < dims.head_dim; ++d, at += plane.dim_stride_bytes, decoded += SizeOf(dtype)) {
      const float x = ValueAt(at, dtype);
      const float error = ValueAt(decoded, dtype) - x;
      if (!std::isfinite(error)) continue;
      squares += static_cast<double>(x) * static_cast<double>(x);
      error_squares += static_cast<double>(error) * static_cast<double>(error);
    }
  }
  sums->squares += squares;
  sums->error_squares += error_squares;
  sums->any = true;
}

TierSums SumPlane(const ChunkView& chunk, PlaneId id, const SourcePlane& plane, const uint8_t* decoded) {
  TierSums sums;
  const ChunkDims& dims = chunk.dims;
  const size_t token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  const uint32_t step = (dims.tokens + kSampledTokens - 1) / kSampledTokens;
  for (uint32_t t = 0; t < dims.tokens; t += step, decoded += step * token_bytes) {
    const uint8_t map = chunk.tier_map()[t];
    Sums* of_tier = &sums[static_cast<size_t>(id == PlaneId::kK ? TierOfK(map) : TierOfV(map))];
    switch (dims.dtype) {
      case DType::kFloat16: AddToken<DType::kFloat16>(dims, plane.rows[t], plane, decoded, of_tier); break;
      case DType::kBFloat16: AddToken<DType::kBFloat16>(dims, plane.rows[t], plane, decoded, of_tier); break;
      case DType::kFloat32: AddToken<DType::kFloat32>(dims, plane.rows[t], plane, decoded, of_tier); break;
    }
  }
  return sums;
}

std::array<std::optional<double>, kTierCount> RatiosOf(const TierSums& sums) {
  std::array<std::optional<double>, kTierCount> ratios;
  for (size_t tier = 0; tier < ratios.size(); ++tier) {
    const Sums& of_tier = sums[tier];
    if (!of_tier.any) continue;
    // An error where everything was 0 would be infinite; no tier makes one.
    ratios[tier] = of_tier.squares > 0 ? std::sqrt(of_tier.error_squares / of_tier.squares) : 0;
  }
  return ratios;
}

struct DensePlane {
  DensePlane(const ChunkDims& dims, uint8_t* memory) : rows(dims.tokens) {
    const size_t element = SizeOf(dims.dtype);
    head_bytes = static_cast<int64_t>(dims.head_dim * element);
    for (uint32_t t = 0; t < dims.tokens; ++t) rows[t] = memory + size_t{t} * dims.heads * dims.head_dim * element;
    target = {rows.data(), head_bytes, static_cast<int64_t>(element)};
  }
  std::vector<uint8_t*> rows;
  int64_t head_bytes = 0;
  TargetPlane target;
};

}  // namespace

ReconstructionError MeasureReconstruction(const Backend& backend, const EncodeSource& source, const ChunkCut& cut,
                                          const uint8_t* data, size_t size, EncodeScratch* scratch) {
  ChunkView chunk;
  if (ParseChunk(data, size, &chunk) != Refusal::kNone || chunk.dims.tokens != cut.token_count) return {};
  const ChunkDims& dims = chunk.dims;
  const size_t plane_bytes = size_t{dims.tokens} * dims.heads * dims.head_dim * SizeOf(dims.dtype);
  std::vector<uint8_t> decoded((dims.has_v ? 2 : 1) * plane_bytes);
  const DensePlane k_out(dims, decoded.data());
  const DensePlane v_out(dims, decoded.data() + (dims.has_v ? plane_bytes : 0));
  backend.Decode(chunk, dims.dtype, k_out.target, dims.has_v ? &v_out.target : nullptr, &scratch->workspace);

  const TierSums k =
      SumPlane(chunk, PlaneId::kK, SourcePlaneOf(source, cut, PlaneId::kK, &scratch->k_rows), decoded.data());
  TierSums v;
  if (dims.has_v) {
    const SourcePlane plane = SourcePlaneOf(source, cut, PlaneId::kV, &scratch->v_rows);
    v = SumPlane(chunk, PlaneId::kV, plane, decoded.data() + plane_bytes);
  }
  if (SourceWasWritten(source, cut, scratch)) return {};
  return {RatiosOf(k), RatiosOf(v)};
}

}  // namespace spectrumkv
