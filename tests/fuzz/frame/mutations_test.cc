// The fuzz target over its corpus and seeded mutations of it, for builds without libFuzzer.
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

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> Corpus() {
  std::vector<Bytes> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(SPECTRUMKV_SOURCE_DIR "/tests/fuzz/frame/corpus")) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::sort(corpus.begin(), corpus.end());
  return corpus;
}

TEST(FrameFuzz, Corpus) {
  const auto corpus = Corpus();
  EXPECT_GE(corpus.size(), 12u);
  for (const Bytes& seed : corpus) {
    LLVMFuzzerTestOneInput(seed.data(), seed.size());
    for (size_t size = 0; size < seed.size(); ++size) LLVMFuzzerTestOneInput(seed.data(), size);
  }
}

TEST(FrameFuzz, Mutations) {
  std::mt19937_64 random(19);
  const auto corpus = Corpus();
  ASSERT_FALSE(corpus.empty());
  constexpr uint8_t kOdd[] = {0x00, 0x01, 0x0a, 0x12, 0x7f, 0x80, 0xff};
  for (int i = 0; i < 60'000; ++i) {
    Bytes input = corpus[random() % corpus.size()];
    for (uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      const size_t at = input.empty() ? 0 : random() % input.size();
      const auto where = input.begin() + static_cast<std::ptrdiff_t>(at);
      switch (random() % 5) {
        case 0:
          if (!input.empty()) input[at] ^= static_cast<uint8_t>(1u << random() % 8);
          break;
        case 1:
          if (!input.empty()) input[at] = kOdd[random() % sizeof kOdd];
          break;
        case 2: input.insert(where, kOdd[random() % sizeof kOdd]); break;
        case 3:
          if (!input.empty()) input.erase(where);
          break;
        default: {
          const Bytes& other = corpus[random() % corpus.size()];
          input.insert(input.end(), other.begin() + (other.empty() ? 0 : 1), other.end());
        }
      }
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

TEST(FrameFuzz, RandomInputs) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 20'000; ++i) {
    Bytes input(random() % 80);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

}  // namespace
}  // namespace spectrumkv
