// The fuzz target over its corpus and seeded random inputs, for builds without libFuzzer.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace spectrumkv {
namespace {

TEST(PlanFuzz, RandomInputs) {
  std::mt19937_64 random(20260608);
  for (int i = 0; i < 4000; ++i) {
    std::vector<uint8_t> input(random() % 3000);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
    // Mostly without the wild floats, which are refused at once.
    if (input.size() > 32 && i % 4 != 0) {
      if (input[1] % 8 == 0) ++input[1];
      for (size_t at = 12; at < 24; ++at) input[at] &= 0x2F;
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

// Inputs the fuzzer found, one for each of many paths.
TEST(PlanFuzz, Corpus) {
  int replayed = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SPECTRUMKV_SOURCE_DIR "/tests/fuzz/plan/corpus")) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++replayed;
  }
  EXPECT_GT(replayed, 30);
}

TEST(PlanFuzz, ShortInputs) {
  LLVMFuzzerTestOneInput(nullptr, 0);
  for (int byte = 0; byte < 256; ++byte) {
    const std::vector<uint8_t> input(64, static_cast<uint8_t>(byte));
    for (size_t size = 1; size <= input.size(); size += 7) LLVMFuzzerTestOneInput(input.data(), size);
  }
}

}  // namespace
}  // namespace spectrumkv
