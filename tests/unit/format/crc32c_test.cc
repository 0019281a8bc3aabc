#include "kernels/format/crc32c.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/format/crc32c_impl.h"

namespace spectrumkv {
namespace {

// RFC 3720, B.4, and the check value of the CRC catalogue.
TEST(Crc32cTest, KnownValues) {
  EXPECT_EQ(Crc32c(0, "123456789", 9), 0xE3069283u);
  EXPECT_EQ(Crc32cPortable(0, "123456789", 9), 0xE3069283u);
  std::vector<uint8_t> bytes(32, 0);
  EXPECT_EQ(Crc32c(0, bytes.data(), 32), 0x8A9136AAu);
  bytes.assign(32, 0xFF);
  EXPECT_EQ(Crc32c(0, bytes.data(), 32), 0x62A8AB43u);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(Crc32c(0, bytes.data(), 32), 0x46DD794Eu);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(31 - i);
  EXPECT_EQ(Crc32c(0, bytes.data(), 32), 0x113FDB5Cu);
  EXPECT_EQ(Crc32c(0, nullptr, 0), 0u);
  EXPECT_EQ(Crc32c(0x12345678u, nullptr, 0), 0x12345678u);
}

using Extend = uint32_t (*)(uint32_t, const uint8_t*, size_t);

void ExpectEqualsPortable(Extend extend) {
  std::mt19937 rng(7);
  std::vector<uint8_t> bytes(9000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  for (size_t size = 0; size < 1200; ++size) {
    const size_t offset = size % 17;
    const uint32_t start = rng();
    ASSERT_EQ(~extend(~start, bytes.data() + offset, size), Crc32cPortable(start, bytes.data() + offset, size)) << size;
  }
  for (size_t size : {2047u, 2048u, 2049u, 2303u, 2304u, 2305u, 4095u, 4096u, 8191u, 8960u}) {
    for (size_t offset : {0u, 1u, 13u, 40u}) {
      ASSERT_EQ(~extend(~7u, bytes.data() + offset, size), Crc32cPortable(7, bytes.data() + offset, size)) << size;
    }
  }
}

TEST(Crc32cTest, InstructionEqualsTables) {
  if (!crc32c_internal::Sse42Supported()) GTEST_SKIP() << "SKIPPED: no SSE4.2";
  ExpectEqualsPortable(crc32c_internal::ExtendSse42);
}

TEST(Crc32cTest, WideFoldingEqualsTables) {
  if (!crc32c_internal::VpclmulSupported()) GTEST_SKIP() << "SKIPPED: no VPCLMULQDQ";
  ExpectEqualsPortable(crc32c_internal::ExtendVpclmul);
}

TEST(Crc32cTest, ContinuesAnywhere) {
  std::vector<uint8_t> bytes(5000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + i / 255);
  const uint32_t whole = Crc32c(0, bytes.data(), bytes.size());
  for (size_t cut : {0u, 1u, 59u, 60u, 64u, 255u, 2500u, 4999u, 5000u}) {
    EXPECT_EQ(Crc32c(Crc32c(0, bytes.data(), cut), bytes.data() + cut, bytes.size() - cut), whole) << cut;
  }
}

}  // namespace
}  // namespace spectrumkv
