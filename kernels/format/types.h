// Names of the chunk format: data types and tiers. Source: proto/WIRE_FORMAT.md. Compiled by g++ and nvcc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv {

enum class DType : uint8_t { kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3 };

constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Ids as in the tier map.
enum class Tier : uint8_t { kRaw = 0, kP8 = 1, kQ4 = 2, kQ3 = 3, kQ2 = 4, kP4 = 5, kQ8 = 6 };
constexpr int kTierCount = 7;

constexpr bool IsRotated(Tier t) {
  return t == Tier::kQ8 || t == Tier::kQ4 || t == Tier::kQ3 || t == Tier::kQ2;
}
constexpr bool IsPlain(Tier t) { return t == Tier::kP8 || t == Tier::kP4; }
constexpr bool HasScale8(Tier t) { return t == Tier::kQ4 || t == Tier::kQ3 || t == Tier::kQ2; }
constexpr bool HasScale16(Tier t) { return t == Tier::kQ8 || t == Tier::kP8 || t == Tier::kP4; }

// "RAW", "P8", ...; "?" for anything else.
const char* TierName(Tier tier);
// "float16", "bfloat16", "float32"; "?" for anything else.
const char* DTypeName(DType dtype);

constexpr uint8_t TierMapByte(Tier k, Tier v) {
  return static_cast<uint8_t>(static_cast<uint8_t>(k) | static_cast<uint8_t>(v) << 4);
}
constexpr Tier TierOfK(uint8_t map_byte) { return static_cast<Tier>(map_byte & 15); }
constexpr Tier TierOfV(uint8_t map_byte) { return static_cast<Tier>(map_byte >> 4); }

}  // namespace spectrumkv
