// Three small chunks, one per dtype, that hold every tier, K and V, two centre runs and escapes. Their checksums come
// from tests/golden/self_test.py, an implementation apart from this one.
#include <cstring>
#include <vector>

#include "kernels/codec/codec_math.h"
#include "kernels/codec/registry.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kTokens = 67, kHeads = 2;

struct SelfTestCase {
  uint32_t head_dim;
  DType dtype;
  uint64_t chunk_bytes;
  uint32_t body_crc, decoded_crc, scan_crc, spread_crc, attend_crc;
};

constexpr SelfTestCase kCases[] = {
    {128, DType::kFloat16, 30928, 0xAC4C7177, 0xFC1DE789, 0x235FD444, 0x5851CADC, 0x5DCEBAD9},
    {64, DType::kBFloat16, 15712, 0x475CA90B, 0x97A5C9F4, 0x22F4B43F, 0xFC5603CA, 0xC7DE66EE},
    {80, DType::kFloat32, 27760, 0x6A81560A, 0x960ACB4C, 0xA3DC4766, 0x6BB7A8A2, 0x377C54B0},
};

ChunkDims DimsOf(const SelfTestCase& test) { return ChunkDims{kTokens, kHeads, test.head_dim, test.dtype, true}; }

void PutWord(uint8_t* data, DType dtype, size_t index, uint32_t word) {
  std::memcpy(data + index * SizeOf(dtype), &word, SizeOf(dtype));  // little-endian
}

// K [tokens, heads, head_dim], then V: magnitudes of 1/8 to 8, as in self_test.py.
std::vector<uint8_t> MakeWords(const SelfTestCase& test) {
  const size_t plane = size_t{kTokens} * kHeads * test.head_dim;
  std::vector<uint8_t> words(2 * plane * SizeOf(test.dtype));
  uint32_t x = 2026;
  for (size_t i = 0; i < 2 * plane; ++i) {
    x = x * 1664525u + 1013904223u;
    const uint32_t r = x >> 8, sign = r >> 23 & 1, step = (r >> 20 & 7) % 6;
    uint32_t word = 0;
    switch (test.dtype) {
      case DType::kFloat16: word = sign << 15 | (12 + step) << 10 | (r & 0x3FF); break;
      case DType::kBFloat16: word = sign << 15 | (124 + step) << 7 | (r & 0x7F); break;
      case DType::kFloat32: word = sign << 31 | (124 + step) << 23 | (r & 0xFFFFF) << 3; break;
    }
    PutWord(words.data(), test.dtype, i, word);
  }
  if (test.dtype == DType::kFloat32) {  // a NaN, just above 1024, just above 65504
    const auto at = [&](size_t p, size_t t, size_t h, size_t d) {
      return p * plane + (t * kHeads + h) * test.head_dim + d;
    };
    PutWord(words.data(), test.dtype, at(0, 9, 1, 3), 0x7FC00001);
    PutWord(words.data(), test.dtype, at(1, 11, 0, 5), 0x44800001);
    PutWord(words.data(), test.dtype, at(1, 5, 1, 7), 0xC7800000);
  }
  return words;
}

template <typename Byte>
std::vector<Byte*> Rows(Byte* plane, size_t token_bytes) {
  std::vector<Byte*> rows(kTokens);
  for (uint32_t t = 0; t < kTokens; ++t) rows[t] = plane + t * token_bytes;
  return rows;
}

float WordValue(const uint8_t* from, DType dtype) {
  uint32_t word = 0;
  std::memcpy(&word, from, SizeOf(dtype));
  return dtype == DType::kFloat32 ? BitsFloat(word) : dtype == DType::kFloat16 ? HalfToFloat(word) : BfloatToFloat(word);
}

// Six queries on head 1: keys of tokens 3, 14, ..., 58, an eighth of them and turned round, at the positions of those
// tokens plus 5. All that they see, then a window of 20 with a soft cap of 2.5.
uint32_t AttendCrc(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, Workspace* workspace) {
  constexpr uint32_t kQueries = 6;
  std::vector<float> values;
  uint32_t positions[kQueries];
  for (uint32_t i = 0; i < kQueries; ++i) {
    const uint32_t token = 3 + 11 * i;
    positions[i] = token + 5;
    const uint8_t* cell = k.rows[token] + k.head_stride_bytes;
    for (uint32_t d = dims.head_dim; d-- > 0;) values.push_back(0.125f * WordValue(cell + d * k.dim_stride_bytes, dims.dtype));
  }
  float scores[2][kTokens];
  backend.Attend(dims, k, 1, AttendQueries{values.data(), positions, kQueries, 0, 0.0f}, workspace, scores[0]);
  backend.Attend(dims, k, 1, AttendQueries{values.data(), positions, kQueries, 20, 2.5f}, workspace, scores[1]);
  return Crc32c(0, reinterpret_cast<const uint8_t*>(scores), sizeof(scores));
}

// K around its means, V of few heads, and the words of V as 16 tokens of 8 heads, of which less is sampled.
uint32_t SpreadCrc(const Backend& backend, const ChunkDims& dims, const SourcePlane& k, const SourcePlane& v,
                   Workspace* workspace) {
  constexpr uint32_t kWideTokens = 16, kWideHeads = 8;
  uint8_t spreads[2][kTokens], wide_spreads[kWideTokens];
  backend.Spread(dims, k, true, 3, workspace, spreads[0]);
  backend.Spread(dims, v, false, 0, workspace, spreads[1]);
  ChunkDims wide = dims;
  wide.tokens = kWideTokens;
  wide.heads = kWideHeads;
  const uint8_t* rows[kWideTokens];
  for (uint32_t t = 0; t < kWideTokens; ++t) rows[t] = v.rows[0] + t * kWideHeads * v.head_stride_bytes;
  backend.Spread(wide, SourcePlane{rows, v.head_stride_bytes, v.dim_stride_bytes}, false, 0, workspace, wide_spreads);
  return Crc32c(Crc32c(0, spreads, sizeof(spreads)), wide_spreads, sizeof(wide_spreads));
}

// What differs, or null.
const char* RunCase(const Backend& backend, const SelfTestCase& test) {
  const ChunkDims dims = DimsOf(test);
  const std::vector<uint8_t> words = MakeWords(test);
  const int64_t word = static_cast<int64_t>(SizeOf(test.dtype)), head = word * test.head_dim;
  const size_t token_bytes = static_cast<size_t>(head) * kHeads;
  const std::vector<const uint8_t*> k_rows = Rows(words.data(), token_bytes);
  const std::vector<const uint8_t*> v_rows = Rows(words.data() + words.size() / 2, token_bytes);
  const SourcePlane k{k_rows.data(), head, word}, v{v_rows.data(), head, word};

  TokenScan scans[2][kTokens];
  backend.Scan(dims, k, scans[0]);
  backend.Scan(dims, v, scans[1]);
  uint32_t scan_crc = 0;
  for (const auto& plane : scans) {
    for (const TokenScan& scan : plane) {
      const uint8_t bytes[2] = {static_cast<uint8_t>(scan.escape), scan.energy_log2};
      scan_crc = Crc32c(scan_crc, bytes, sizeof(bytes));
    }
  }
  if (scan_crc != test.scan_crc) return "Scan";

  Workspace workspace;
  if (SpreadCrc(backend, dims, k, v, &workspace) != test.spread_crc) return "Spread";
  if (AttendCrc(backend, dims, k, &workspace) != test.attend_crc) return "Attend";

  uint8_t tiers[kTokens];
  for (uint32_t t = 0; t < kTokens; ++t) {
    tiers[t] = TierMapByte(static_cast<Tier>(t % kTierCount), static_cast<Tier>(t / kTierCount % kTierCount));
  }
  std::vector<uint8_t> chunk(MaxChunkBytes(dims));
  const EncodeResult encoded = backend.Encode(dims, ChunkIdentity{0x5EC7, 3, 1, 2, 64, 4}, k, &v, tiers, &workspace,
                                              chunk.data(), chunk.size());
  if (encoded.chunk_bytes != test.chunk_bytes) return "Encode (length)";
  if (Crc32c(0, chunk.data() + kHeaderBytes, test.chunk_bytes - kHeaderBytes) != test.body_crc) return "Encode";
  ChunkView view;
  if (ParseChunk(chunk.data(), test.chunk_bytes, &view) != Refusal::kNone) return "Encode (header)";

  std::vector<uint8_t> decoded(words.size());
  const std::vector<uint8_t*> k_out = Rows(decoded.data(), token_bytes);
  const std::vector<uint8_t*> v_out = Rows(decoded.data() + decoded.size() / 2, token_bytes);
  const TargetPlane k_target{k_out.data(), head, word}, v_target{v_out.data(), head, word};
  backend.Decode(view, test.dtype, k_target, &v_target, &workspace);
  return Crc32c(0, decoded.data(), decoded.size()) == test.decoded_crc ? nullptr : "Decode";
}

}  // namespace

bool SelfTest(const Backend& backend, std::string* detail) {
  if (!backend.supported()) {
    *detail = std::string(backend.name()) + ": not supported by this machine";
    return false;
  }
  for (const SelfTestCase& test : kCases) {
    if (const char* what = RunCase(backend, test)) {
      *detail = std::string(backend.name()) + ": " + what + " differs from the golden chunk of " +
                DTypeName(test.dtype) + ", head_dim " + std::to_string(test.head_dim);
      return false;
    }
  }
  return true;
}

}  // namespace spectrumkv
