// The definition: the formulas of proto/WIRE_FORMAT.md in portable code, one cell at a time.
#include <cstring>

#include "kernels/codec/attend_math.h"
#include "kernels/codec/cell_ops.h"
#include "kernels/codec/codec_math.h"
#include "kernels/codec/scan_math.h"
#include "kernels/format/chunk.h"

namespace spectrumkv {
namespace {

struct alignas(64) CellValues {
  float x[kMaxHeadDim];
};

void Widen(const uint8_t* source, DType dtype, uint32_t count, float* x) {
  if (dtype == DType::kFloat32) {
    std::memcpy(x, source, count * sizeof(float));
    return;
  }
  for (uint32_t d = 0; d < count; ++d) {
    uint16_t word;
    std::memcpy(&word, source + 2 * d, sizeof(word));
    x[d] = dtype == DType::kFloat16 ? HalfToFloat(word) : BfloatToFloat(word);
  }
}

void Narrow(const float* x, DType dtype, uint32_t count, uint8_t* target) {
  if (dtype == DType::kFloat32) {
    std::memcpy(target, x, count * sizeof(float));
    return;
  }
  for (uint32_t d = 0; d < count; ++d) {
    const uint16_t word = static_cast<uint16_t>(dtype == DType::kFloat16 ? NarrowHalf(x[d]) : NarrowBfloat(x[d]));
    std::memcpy(target + 2 * d, &word, sizeof(word));
  }
}

float MaxMagnitude(const float* x, uint32_t count) {
  uint32_t largest = 0;  // magnitudes order like their bits
  for (uint32_t d = 0; d < count; ++d) {
    const uint32_t bits = FloatBits(x[d]) & 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return BitsFloat(largest);
}

void Rotate(float* x, uint32_t head_dim) {
  const uint32_t rotation = RotationOf(head_dim);
  for (uint32_t h = 1; h < rotation; h *= 2) {
    for (uint32_t block = 0; block < head_dim; block += 2 * h) {
      for (uint32_t i = block; i < block + h; ++i) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
}

// --- Packing: codes[] holds one code per byte.

void PackNibbles(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t half = head_dim / 2;
  for (uint32_t i = 0; i < half; ++i) out[i] = static_cast<uint8_t>(codes[i] | codes[i + half] << 4);
}

void PackPairs(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t q = head_dim / 4;
  for (uint32_t i = 0; i < q; ++i) {
    out[i] = static_cast<uint8_t>((codes[i] & 3) | (codes[i + q] & 3) << 2 | (codes[i + 2 * q] & 3) << 4 |
                                  (codes[i + 3 * q] & 3) << 6);
  }
}

void PackHighBits(const uint8_t* codes, uint32_t head_dim, uint8_t* out) {
  const uint32_t e = head_dim / 8;
  for (uint32_t i = 0; i < e; ++i) {
    uint32_t byte = 0;
    for (uint32_t j = 0; j < 8; ++j) byte |= static_cast<uint32_t>(codes[i + j * e] >> 2) << j;
    out[i] = static_cast<uint8_t>(byte);
  }
}

void Pack(const uint8_t* codes, Tier tier, uint32_t head_dim, uint8_t* out) {
  switch (tier) {
    case Tier::kP4:
    case Tier::kQ4: PackNibbles(codes, head_dim, out); break;
    case Tier::kQ3:
      PackPairs(codes, head_dim, out);
      PackHighBits(codes, head_dim, out + head_dim / 4);
      break;
    case Tier::kQ2: PackPairs(codes, head_dim, out); break;
    default: std::memcpy(out, codes, head_dim); break;
  }
}

void Unpack(const uint8_t* in, Tier tier, uint32_t head_dim, uint8_t* codes) {
  if (tier == Tier::kP4 || tier == Tier::kQ4) {
    const uint32_t half = head_dim / 2;
    for (uint32_t i = 0; i < half; ++i) {
      codes[i] = in[i] & 15;
      codes[i + half] = static_cast<uint8_t>(in[i] >> 4);
    }
    return;
  }
  const uint32_t q = head_dim / 4, e = head_dim / 8;
  for (uint32_t i = 0; i < q; ++i) {
    for (uint32_t j = 0; j < 4; ++j) codes[i + j * q] = in[i] >> (2 * j) & 3;
  }
  for (uint32_t i = 0; tier == Tier::kQ3 && i < e; ++i) {
    for (uint32_t j = 0; j < 8; ++j) {
      uint8_t& code = codes[i + j * e];
      code = static_cast<uint8_t>(code | (in[q + i] >> j & 1) << 2);
    }
  }
}

// --- Quantising: one code per byte.

void RoundCodes(const float* x, float reciprocal, int32_t top, uint32_t count, uint8_t* codes) {
  for (uint32_t d = 0; d < count; ++d) {
    codes[d] = static_cast<uint8_t>(ClampInt(RoundToInt(x[d] * reciprocal), -top, top));
  }
}

void FloorCodes(const float* z, float reciprocal, int bits, uint32_t count, uint8_t* codes) {
  const int32_t middle = 1 << (bits - 1);
  for (uint32_t d = 0; d < count; ++d) {
    codes[d] = static_cast<uint8_t>(ClampInt(FloorToInt(z[d] * reciprocal) + middle, 0, 2 * middle - 1));
  }
}

void StoreScale16(const Scale& scale, uint8_t* out) {
  const uint16_t bits = static_cast<uint16_t>(scale.bits);
  std::memcpy(out, &bits, sizeof(bits));
}

void EncodePlainCell(const float* x, Tier tier, uint32_t head_dim, uint8_t* scale_out, uint8_t* codes) {
  const int32_t top = tier == Tier::kP8 ? 127 : 7;
  const Scale scale = PlainScale(MaxMagnitude(x, head_dim), static_cast<float>(top));
  StoreScale16(scale, scale_out);
  RoundCodes(x, scale.reciprocal, top, head_dim, codes);
  for (uint32_t d = 0; tier == Tier::kP4 && d < head_dim; ++d) codes[d] = static_cast<uint8_t>(codes[d] + 8);
}

void EncodeRotatedCell(const float* z, Tier tier, uint32_t head_dim, uint8_t* scale_out, uint8_t* codes) {
  const float rotation = static_cast<float>(RotationOf(head_dim));
  const float absmax = MaxMagnitude(z, head_dim);
  if (tier == Tier::kQ8) {
    const Scale scale = Rotated8Scale(absmax, rotation, 1.0f / rotation);
    StoreScale16(scale, scale_out);
    RoundCodes(z, scale.reciprocal, 127, head_dim, codes);
    return;
  }
  const int bits = BitsOf(tier);
  const Scale scale = SteppedScale(absmax, StepShare(bits, head_dim), rotation, 1.0f / rotation);
  *scale_out = static_cast<uint8_t>(scale.bits);
  // Where the byte is 0 so is the reciprocal: floor(+-0) + 2^(b-1) is the middle code, as it must be.
  FloorCodes(z, scale.reciprocal, bits, head_dim, codes);
}

uint32_t WordMagnitude(const uint8_t* from, DType dtype, uint32_t count) {
  uint32_t largest = 0;
  for (uint32_t d = 0; d < count; ++d) {
    uint32_t bits;
    if (dtype == DType::kFloat32) {
      std::memcpy(&bits, from + 4 * d, sizeof(bits));
      bits &= 0x7FFFFFFF;
    } else {
      uint16_t word;
      std::memcpy(&word, from + 2 * d, sizeof(word));
      bits = word & 0x7FFFu;
    }
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Calls each(from, head) for the cells in order; returns the largest magnitude word.
template <typename Each>
uint32_t ForCells(const CellsIn& cells, const Each& each) {
  uint32_t largest = 0;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    for (uint32_t h = 0; h < cells.heads; ++h) {
      const uint8_t* from = cells.rows[t] + h * cells.head_stride_bytes;
      const uint32_t magnitude = WordMagnitude(from, cells.dtype, cells.head_dim);
      largest = magnitude > largest ? magnitude : largest;
      each(from, h);
    }
  }
  return largest;
}

uint32_t EncodeCells(const CellsIn& cells, Tier tier, const Centres& centres, uint8_t* scales, uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim;
  const size_t cell_bytes = CellBytes(tier, head_dim, cells.dtype);
  const size_t scale_bytes = HasScale8(tier) ? 1 : 2;
  CellValues values;
  uint8_t unpacked[kMaxHeadDim];
  const uint32_t largest = ForCells(cells, [&](const uint8_t* from, uint32_t head) {
    Widen(from, cells.dtype, head_dim, values.x);
    if (IsRotated(tier)) {
      const float* mean = centres.means == nullptr ? nullptr : centres.means + size_t{head} * head_dim;
      for (uint32_t d = 0; mean != nullptr && d < head_dim; ++d) values.x[d] -= mean[d];
      Rotate(values.x, head_dim);
      EncodeRotatedCell(values.x, tier, head_dim, scales, unpacked);
    } else {
      EncodePlainCell(values.x, tier, head_dim, scales, unpacked);
    }
    Pack(unpacked, tier, head_dim, codes);
    scales += scale_bytes;
    codes += cell_bytes;
  });
  return centres.means == nullptr ? largest : 0;
}

// --- Decoding

float LoadScale16(const uint8_t* in) {
  uint16_t bits;
  std::memcpy(&bits, in, sizeof(bits));
  return HalfToFloat(bits);
}

void DecodeSignedBytes(const uint8_t* codes, float scale, uint32_t count, float* x) {
  for (uint32_t d = 0; d < count; ++d) x[d] = static_cast<float>(static_cast<int8_t>(codes[d])) * scale;
}

void DecodeCell(Tier tier, uint32_t head_dim, const uint8_t* scale_in, const uint8_t* packed, float* x) {
  if (tier == Tier::kP8 || tier == Tier::kQ8) {
    const float stored = LoadScale16(scale_in);
    return DecodeSignedBytes(packed, tier == Tier::kQ8 ? stored * 0.015625f : stored, head_dim, x);
  }
  uint8_t unpacked[kMaxHeadDim];
  Unpack(packed, tier, head_dim, unpacked);
  const float scale = tier == Tier::kP4 ? LoadScale16(scale_in) : SteppedScaleValue(*scale_in);
  const float middle = tier == Tier::kP4 ? 8.0f : static_cast<float>(1 << (BitsOf(tier) - 1)) - 0.5f;
  for (uint32_t d = 0; d < head_dim; ++d) x[d] = (static_cast<float>(unpacked[d]) - middle) * scale;
}

void DecodeCells(const CellsOut& cells, Tier tier, const Centres& centres, const uint8_t* scales,
                 const uint8_t* codes) {
  const uint32_t head_dim = cells.head_dim;
  const size_t cell_bytes = CellBytes(tier, head_dim, cells.dtype);
  const size_t scale_bytes = HasScale8(tier) ? 1 : 2;
  CellValues values;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    for (uint32_t h = 0; h < cells.heads; ++h, scales += scale_bytes, codes += cell_bytes) {
      DecodeCell(tier, head_dim, scales, codes, values.x);
      if (IsRotated(tier)) {
        Rotate(values.x, head_dim);
        const float* mean = centres.means == nullptr ? nullptr : centres.means + size_t{h} * head_dim;
        for (uint32_t d = 0; mean != nullptr && d < head_dim; ++d) values.x[d] += mean[d];
      }
      Narrow(values.x, cells.dtype, head_dim, cells.rows[t] + h * cells.head_stride_bytes);
    }
  }
}

// --- Passes over values

uint32_t Magnitude(const CellsIn& cells) {
  return ForCells(cells, [](const uint8_t*, uint32_t) {});
}

uint32_t Energy(const CellsIn& cells, float* lanes_or_null, float* sum) {
  CellValues values;
  float lanes[kEnergyLanes] = {};
  if (lanes_or_null != nullptr) std::memcpy(lanes, lanes_or_null, sizeof(lanes));
  const uint32_t largest = ForCells(cells, [&](const uint8_t* from, uint32_t) {
    Widen(from, cells.dtype, cells.head_dim, values.x);
    for (uint32_t d = 0; d < cells.head_dim; ++d) lanes[d % kEnergyLanes] += values.x[d] * values.x[d];
  });
  if (lanes_or_null != nullptr) std::memcpy(lanes_or_null, lanes, sizeof(lanes));
  *sum = FoldEnergy(lanes);
  return largest;
}

uint32_t Accumulate(const CellsIn& cells, float* sums) {
  CellValues values;
  return ForCells(cells, [&](const uint8_t* from, uint32_t head) {
    Widen(from, cells.dtype, cells.head_dim, values.x);
    for (uint32_t d = 0; d < cells.head_dim; ++d) sums[size_t{head} * cells.head_dim + d] += values.x[d];
  });
}

void Spread(const CellsIn& cells, const float* means, float* sums) {
  CellValues values;
  for (uint32_t t = 0; t < cells.tokens; ++t) {
    float lanes[kEnergyLanes] = {};
    for (uint32_t h = 0; h < cells.heads; ++h) {
      Widen(cells.rows[t] + h * cells.head_stride_bytes, cells.dtype, cells.head_dim, values.x);
      const float* mean = means == nullptr ? nullptr : means + size_t{h} * cells.head_dim;
      for (uint32_t d = 0; d < cells.head_dim; ++d) {
        const float x = mean == nullptr ? values.x[d] : values.x[d] - mean[d];
        lanes[d % kEnergyLanes] += x * x;
      }
    }
    sums[t] = FoldEnergy(lanes);
  }
}

void Attend(const CellsIn& keys, uint32_t first_position, const AttendQueries& queries, float* panel, float* weights,
            float* tops, float* sums) {
  const uint32_t head_dim = keys.head_dim;
  const float cap = queries.soft_cap, inverse_cap = cap == 0.0f ? 0.0f : 1.0f / cap;
  for (uint32_t t = 0; t < keys.tokens; ++t) Widen(keys.rows[t], keys.dtype, head_dim, panel + size_t{t} * head_dim);
  for (uint32_t q = 0; q < queries.count; ++q, weights += kAttendTokens) {
    const float* query = queries.values + size_t{q} * head_dim;
    const SeenTokens seen = SeenOf(queries.positions[q], queries.window, first_position, keys.tokens);
    float top = kHiddenLogit;
    for (uint32_t t = 0; t < kAttendTokens; ++t) {
      weights[t] = kHiddenLogit;
      if (t < seen.first || t >= seen.last) continue;
      float dot = 0.0f;
      for (uint32_t d = 0; d < head_dim; ++d) dot = __builtin_fmaf(query[d], panel[size_t{t} * head_dim + d], dot);
      if (!(dot >= -kMaxLogit && dot <= kMaxLogit)) continue;
      weights[t] = cap == 0.0f ? dot : SoftCap(dot, cap, inverse_cap);
      top = weights[t] > top ? weights[t] : top;
    }
    float lanes[kAttendTokens];
    for (uint32_t t = 0; t < kAttendTokens; ++t) {
      lanes[t] = weights[t] = weights[t] == kHiddenLogit ? 0.0f : ExpOf(weights[t] - top);
    }
    tops[q] = top;
    sums[q] = FoldEnergy(lanes);
  }
}

void Fold(const float* weights, const float* factors, uint32_t count, float* scores) {
  for (uint32_t q = 0; q < count; ++q, weights += kAttendTokens) {
    if (factors[q] == 0.0f) continue;
    for (uint32_t t = 0; t < kAttendTokens; ++t) scores[t] = __builtin_fmaf(weights[t], factors[q], scores[t]);
  }
}

uint32_t Copy(const CellsIn& cells, uint8_t* words) {
  const size_t cell_bytes = size_t{cells.head_dim} * SizeOf(cells.dtype);
  return ForCells(cells, [&](const uint8_t* from, uint32_t) {
    std::memcpy(words, from, cell_bytes);
    words += cell_bytes;
  });
}

void Store(uint8_t* to, const uint8_t* words, size_t bytes) { std::memcpy(to, words, bytes); }

constexpr CellOps kScalarOps = {"scalar", Magnitude, Energy, Accumulate, Spread, Attend, Fold, Copy, EncodeCells, DecodeCells, Store};

}  // namespace

const CellOps& ScalarCellOps() { return kScalarOps; }

}  // namespace spectrumkv
