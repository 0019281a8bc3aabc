// The fuzz target without a fuzzing engine: seeded random bytes, and mutations of an input that is accepted.
#include <gtest/gtest.h>

#include <random>
#include <vector>

int CheckOneSchema(const uint8_t* data, size_t size);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// One segment of 8192 bytes, one group [8 blocks, 4 tokens, 2 heads, 16 dims] of float16 in two layers, as the reader
// in ../schema_fuzz.cc takes it: a value is {shift, byte}.
std::vector<uint8_t> GoodInput() {
  std::vector<uint8_t> in = {0, 1, 0, 0};             // tensor parallel size, rank
  in.insert(in.end(), {0, 2, 0, 8, 32});              // one segment, daemon owned, no name, 32 << 8
  in.insert(in.end(), {0, 0, 1});                     // one group, attention, float16
  in.insert(in.end(), {0, 2, 0, 0, 0, 2, 0, 16});     // heads 2, first 0, count 2, dim 16
  in.insert(in.end(), {0, 4, 0, 8, 0, 2});            // block tokens, blocks, window; two layers
  for (uint8_t layer = 0; layer < 2; ++layer) {
    in.insert(in.end(), {0, layer});
    for (uint8_t plane = 0; plane < 2; ++plane) {
      const auto place = static_cast<uint8_t>(layer * 2 + plane);
      in.insert(in.end(), {0, 11, place, 8, 1, 6, 1, 5, 1, 0, 2});  // offset place << 11, strides 256, 64, 32, 2
      if (plane == 0) in.push_back(1);                              // and there is a V
    }
  }
  in.push_back(0);  // no generation table
  return in;
}

TEST(SchemaFuzz, TheSeedIsAccepted) {
  const std::vector<uint8_t> good = GoodInput();
  EXPECT_EQ(CheckOneSchema(good.data(), good.size()), 1);
  EXPECT_EQ(LLVMFuzzerTestOneInput(good.data(), good.size()), 0);
  EXPECT_EQ(CheckOneSchema(nullptr, 0), 0);
}

TEST(SchemaFuzz, RandomBytesAndMutations) {
  std::mt19937 random(3);
  const std::vector<uint8_t> good = GoodInput();
  int accepted = 0, refused = 0;
  for (int round = 0; round < 40000; ++round) {
    std::vector<uint8_t> in = good;
    if (round % 4 == 0) {
      in.resize(random() % 200);
      for (uint8_t& byte : in) byte = static_cast<uint8_t>(random());
    } else {
      for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
        in[random() % in.size()] = static_cast<uint8_t>(random() % 2 == 0 ? random() % 16 : random());
      }
      if (round % 4 == 1) in.resize(random() % in.size());
    }
    (CheckOneSchema(in.data(), in.size()) != 0 ? accepted : refused) += 1;
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 10000);
}

}  // namespace
