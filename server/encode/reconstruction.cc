#include "server/encode/reconstruction.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/codec/codec_math.h"
#include "server/encode/device_encode.h"

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

// `decoded` is dense [heads, head_dim].
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

// Row i of `source` and of `decoded` are those of the i-th token that is compared. Only the source's strides are read.
struct ComparedPlane {
  SourcePlane source;
  const uint8_t* decoded = nullptr;
  size_t decoded_step_bytes = 0;
};

TierSums SumPlane(const ChunkView& chunk, PlaneId id, const ComparedPlane& compared) {
  TierSums sums;
  const ChunkDims& dims = chunk.dims;
  const SourcePlane& plane = compared.source;
  const uint32_t step = ComparedStep(dims.tokens);
  for (uint32_t t = 0, i = 0; t < dims.tokens; t += step, ++i) {
    const uint8_t map = chunk.tier_map()[t];
    const uint8_t* const decoded = compared.decoded + i * compared.decoded_step_bytes;
    Sums* of_tier = &sums[static_cast<size_t>(id == PlaneId::kK ? TierOfK(map) : TierOfV(map))];
    switch (dims.dtype) {
      case DType::kFloat16: AddToken<DType::kFloat16>(dims, plane.rows[i], plane, decoded, of_tier); break;
      case DType::kBFloat16: AddToken<DType::kBFloat16>(dims, plane.rows[i], plane, decoded, of_tier); break;
      case DType::kFloat32: AddToken<DType::kFloat32>(dims, plane.rows[i], plane, decoded, of_tier); break;
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

ReconstructionError MeasureOnHost(const Backend& backend, const EncodeSource& source, const ChunkCut& cut,
                                  const ChunkView& chunk, EncodeScratch* scratch) {
  const ChunkDims& dims = chunk.dims;
  const size_t token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  std::vector<uint8_t> decoded((dims.has_v ? 2 : 1) * dims.tokens * token_bytes);
  uint8_t* const v_decoded = decoded.data() + (dims.has_v ? dims.tokens * token_bytes : 0);
  const DensePlane k_out(dims, decoded.data()), v_out(dims, v_decoded);
  backend.Decode(chunk, dims.dtype, k_out.target, dims.has_v ? &v_out.target : nullptr, &scratch->workspace);
  const auto sum = [&](PlaneId plane, const uint8_t* dense, std::vector<uint8_t*>* rows) {
    ComparedPlane compared{SourcePlaneOf(source, cut, plane, rows), dense, ComparedStep(dims.tokens) * token_bytes};
    KeepCompared(dims.tokens, rows);
    return SumPlane(chunk, plane, compared);
  };
  ReconstructionError error;
  error.k = RatiosOf(sum(PlaneId::kK, decoded.data(), &scratch->k_rows));
  if (dims.has_v) error.v = RatiosOf(sum(PlaneId::kV, v_decoded, &scratch->v_rows));
  return error;
}

ReconstructionError ErrorsIn(const ChunkView& chunk, std::vector<uint8_t>* dense) {
  const ChunkDims& dims = chunk.dims;
  ChunkDims compared = dims;
  compared.tokens = (dims.tokens + ComparedStep(dims.tokens) - 1) / ComparedStep(dims.tokens);
  const size_t token_bytes = size_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  const size_t plane_bytes = compared.tokens * token_bytes, planes = dims.has_v ? 2 : 1;
  const auto sum = [&](PlaneId plane) {
    uint8_t* const from = dense->data() + (plane == PlaneId::kK ? 0 : plane_bytes);
    const DensePlane original(compared, from);
    const SourcePlane view{original.rows.data(), original.target.head_stride_bytes, original.target.dim_stride_bytes};
    return SumPlane(chunk, plane, {view, from + planes * plane_bytes, token_bytes});
  };
  ReconstructionError error;
  error.k = RatiosOf(sum(PlaneId::kK));
  if (dims.has_v) error.v = RatiosOf(sum(PlaneId::kV));
  return error;
}

bool IsChunkOf(const ChunkCut& cut, const uint8_t* data, size_t size, ChunkView* chunk) {
  return ParseChunk(data, size, chunk) == Refusal::kNone && chunk->dims.tokens == cut.token_count;
}

}  // namespace

void KeepCompared(uint32_t tokens, std::vector<uint8_t*>* rows) {
  const uint32_t step = ComparedStep(tokens);
  for (uint32_t t = 0, i = 0; t < tokens; t += step, ++i) (*rows)[i] = (*rows)[t];
}

ReconstructionError MeasureReconstruction(const Backend& backend, const EncodeSource& source, const ChunkCut& cut,
                                          const uint8_t* data, size_t size, EncodeScratch* scratch) {
  if (source.hold->device() != nullptr) {
    std::vector<MeasuredChunk> one{{&cut, data, size, scratch->generations_before, {}}};
    MeasureReconstructionsOnDevice(source, scratch, &one);
    return one.front().error;
  }
  ChunkView chunk;
  if (!IsChunkOf(cut, data, size, &chunk)) return {};
  const ReconstructionError error = MeasureOnHost(backend, source, cut, chunk, scratch);
  if (SourceWasWritten(source, cut, scratch)) return {};
  return error;
}

void MeasureReconstructionsOnDevice(const EncodeSource& source, EncodeScratch* scratch,
                                    std::vector<MeasuredChunk>* chunks) {
  std::vector<ReadBack> read;
  std::vector<size_t> of;  // chunks, by index in `read`
  std::vector<ChunkView> views;
  for (size_t i = 0; i < chunks->size(); ++i) {
    const MeasuredChunk& chunk = (*chunks)[i];
    ChunkView view;
    if (!IsChunkOf(*chunk.cut, chunk.data, chunk.size, &view)) continue;
    read.push_back({chunk.cut, view.dims, chunk.data, chunk.size, {}});
    of.push_back(i);
    views.push_back(view);
  }
  // Nothing to tell where the device fails: whoever asks it next is told.
  if (read.empty() || !ReadBackOnDevice(source, scratch, &read).ok()) return;
  for (size_t i = 0; i < read.size(); ++i) {
    MeasuredChunk& chunk = (*chunks)[of[i]];
    scratch->generations_before = chunk.generations_before;
    if (!SourceWasWritten(source, *chunk.cut, scratch)) chunk.error = ErrorsIn(views[i], &read[i].dense);
  }
}

}  // namespace spectrumkv
