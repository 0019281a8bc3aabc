#include "tests/differential/planes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/codec/codec_math.h"
#include "kernels/cpu/cpu_backends.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv::testing {
namespace {

constexpr size_t kGuardBytes = 128;

// Odd words per dtype: NaN, infinities, zero and -0, smallest and largest subnormals, 1024 and its neighbours, 65504
// and its neighbours, the largest.
const std::vector<uint32_t>& OddWords(DType dtype) {
  static const std::vector<uint32_t> half = {0x7C01, 0xFE00, 0x7C00, 0xFC00, 0x0000, 0x8000, 0x0001, 0x83FF,
                                             0x0400, 0x6400, 0xE400, 0x6401, 0x63FF, 0x7BFF, 0xFBFF, 0x7BFE};
  static const std::vector<uint32_t> bfloat = {0x7F81, 0xFFC0, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F,
                                               0x4480, 0xC480, 0x4481, 0x447F, 0x477F, 0x4780, 0xC780, 0x7F7F};
  static const std::vector<uint32_t> wide = {
      0x7F800001, 0xFFC00000, 0x7F800000, 0xFF800000, 0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x44800000,
      0xC4800000, 0x44800001, 0x447FFFFF, 0x477FE000, 0xC77FE001, 0x477FDFFF, 0x7F7FFFFF, 0x47800000};
  return dtype == DType::kFloat16 ? half : dtype == DType::kBFloat16 ? bfloat : wide;
}

}  // namespace

Plane::Plane(const ChunkDims& dims, DType dtype, Layout layout, size_t misalignment, uint8_t fill)
    : dims_(dims), dtype_(dtype), fill_(fill) {
  const int64_t word = static_cast<int64_t>(SizeOf(dtype));
  const int64_t tokens = dims.tokens, heads = dims.heads, dim = dims.head_dim;
  int64_t row_stride = 0;
  switch (layout) {
    case Layout::kTokenMajor:
      dim_stride_ = word, head_stride_ = dim * word, row_stride = heads * head_stride_;
      break;
    case Layout::kHeadMajor:
      dim_stride_ = word, row_stride = dim * word, head_stride_ = tokens * row_stride;
      break;
    case Layout::kPadded:
      dim_stride_ = word, head_stride_ = dim * word + 6, row_stride = heads * head_stride_ + 34;
      break;
    case Layout::kDimMajor:
      row_stride = word, dim_stride_ = tokens * word, head_stride_ = dim * dim_stride_;
      break;
  }
  const size_t extent = static_cast<size_t>((tokens - 1) * row_stride + (heads - 1) * head_stride_ +
                                            (dim - 1) * dim_stride_ + word);
  memory_.assign(extent + 2 * kGuardBytes + 64, fill);
  const size_t start = reinterpret_cast<uintptr_t>(memory_.data()) + kGuardBytes;
  uint8_t* first = memory_.data() + kGuardBytes + (64 - start % 64) % 64 + misalignment;
  for (int64_t t = 0; t < tokens; ++t) {
    rows_.push_back(first + t * row_stride);
    const_rows_.push_back(rows_.back());
  }
}

uint8_t* Plane::At(uint32_t token, uint32_t head, uint32_t dim) {
  return rows_[token] + head * head_stride_ + dim * dim_stride_;
}

uint32_t Plane::GetWord(uint32_t token, uint32_t head, uint32_t dim) {
  uint32_t word = 0;
  std::memcpy(&word, At(token, head, dim), SizeOf(dtype_));
  return word;
}

void Plane::SetWord(uint32_t token, uint32_t head, uint32_t dim, uint32_t word) {
  std::memcpy(At(token, head, dim), &word, SizeOf(dtype_));
}

std::vector<uint8_t> Plane::Values() {
  const size_t word = SizeOf(dtype_);
  std::vector<uint8_t> values;
  values.reserve(size_t{dims_.tokens} * dims_.heads * dims_.head_dim * word);
  for (uint32_t t = 0; t < dims_.tokens; ++t) {
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      for (uint32_t d = 0; d < dims_.head_dim; ++d) values.insert(values.end(), At(t, h, d), At(t, h, d) + word);
    }
  }
  return values;
}

bool Plane::GuardsIntact() {
  std::vector<uint8_t> covered(memory_.size(), 0);
  for (uint32_t t = 0; t < dims_.tokens; ++t) {
    for (uint32_t h = 0; h < dims_.heads; ++h) {
      for (uint32_t d = 0; d < dims_.head_dim; ++d) {
        std::memset(covered.data() + (At(t, h, d) - memory_.data()), 1, SizeOf(dtype_));
      }
    }
  }
  for (size_t i = 0; i < memory_.size(); ++i) {
    if (!covered[i] && memory_[i] != fill_) return false;
  }
  return true;
}

uint32_t WordOf(float x, DType dtype) {
  if (dtype == DType::kFloat16) return NarrowHalf(x);
  if (dtype == DType::kBFloat16) return NarrowBfloat(x);
  return FloatBits(x);
}

float ValueOf(uint32_t word, DType dtype) {
  if (dtype == DType::kFloat16) return HalfToFloat(word);
  if (dtype == DType::kBFloat16) return BfloatToFloat(word);
  return BitsFloat(word);
}

void FillNormal(Plane* plane, const ChunkDims& dims, float sigma, std::mt19937_64* rng) {
  std::normal_distribution<float> normal(0.0f, sigma);
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    for (uint32_t h = 0; h < dims.heads; ++h) {
      for (uint32_t d = 0; d < dims.head_dim; ++d) plane->SetWord(t, h, d, WordOf(normal(*rng), dims.dtype));
    }
  }
}

void FillRandom(Plane* plane, const ChunkDims& dims, std::mt19937_64* rng) {
  const std::vector<uint32_t>& odd = OddWords(dims.dtype);
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    // The token's magnitude: mostly ordinary; sometimes at the edge of the subnormals, of an escape or of the dtype.
    const uint64_t kind = (*rng)() % 16;
    const float scale = kind == 0 ? 0.0f : kind == 1 ? 6e-8f : kind == 2 ? 3e-5f : kind == 3 ? 400.0f : 2.0f;
    for (uint32_t h = 0; h < dims.heads; ++h) {
      for (uint32_t d = 0; d < dims.head_dim; ++d) {
        const float unit = static_cast<float>(static_cast<int64_t>((*rng)() >> 40) - (1 << 23)) * 1.1920929e-7f;
        const float x = kind == 4 ? 3.0f : unit * scale * (d % 16 == 3 ? 2.0f : 1.0f);
        plane->SetWord(t, h, d, WordOf(x, dims.dtype));
      }
    }
    if ((*rng)() % 4 == 0) {
      plane->SetWord(t, static_cast<uint32_t>((*rng)() % dims.heads), static_cast<uint32_t>((*rng)() % dims.head_dim),
                     odd[(*rng)() % odd.size()]);
    }
  }
}

std::vector<uint8_t> RandomTiers(const ChunkDims& dims, std::mt19937_64* rng) {
  std::vector<uint8_t> tiers(dims.tokens);
  const bool one_tier = (*rng)() % 4 == 0;
  const auto pick = [rng] { return static_cast<Tier>((*rng)() % kTierCount); };
  const Tier one_k = pick(), one_v = pick();
  for (uint8_t& tier : tiers) {
    const Tier k = one_tier ? one_k : pick(), v = one_tier ? one_v : pick();
    tier = TierMapByte(k, dims.has_v ? v : Tier::kRaw);
  }
  return tiers;
}

void ScrambleChunk(std::vector<uint8_t>* chunk, std::mt19937_64* rng) {
  ChunkView view;
  if (ParseChunk(chunk->data(), chunk->size(), &view) != Refusal::kNone) std::abort();
  const auto bytes = [chunk](const Section& section, auto next) {
    for (uint64_t i = 0; i < section.bytes; ++i) (*chunk)[section.offset + i] = static_cast<uint8_t>(next());
  };
  const auto finite_halves = [&](const Section& section) {
    for (uint64_t i = 0; i + 1 < section.bytes; i += 2) {
      uint16_t half = static_cast<uint16_t>((*rng)());
      if ((half & 0x7C00) == 0x7C00) half = static_cast<uint16_t>(half ^ 0x4000);
      std::memcpy(chunk->data() + section.offset + i, &half, 2);
    }
  };
  bytes(view.layout.centre_codes, [rng] { return (*rng)(); });
  bytes(view.layout.scales8, [rng] { return (*rng)() % 0xF8; });
  finite_halves(view.layout.centre_scales);
  finite_halves(view.layout.scales16);
  for (const Section& codes : view.layout.codes) bytes(codes, [rng] { return (*rng)(); });
  const uint32_t head = Crc32c(0, chunk->data(), 60);
  const uint32_t crc = Crc32c(head, chunk->data() + 64, chunk->size() - 64);
  std::memcpy(chunk->data() + 60, &crc, sizeof(crc));
}

uint64_t Seed() {
  const char* text = std::getenv("SPECTRUMKV_TEST_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 20261129;
  std::printf("SPECTRUMKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

std::vector<const Backend*> OtherBackends() {
  std::vector<const Backend*> backends;
  for (const Backend* backend : {Avx2Backend(), Avx512Backend()}) {
    if (backend->supported()) {
      backends.push_back(backend);
    } else {
      std::printf("SKIPPED: this machine cannot run %s\n", backend->name());
    }
  }
  return backends;
}

}  // namespace spectrumkv::testing
