// Rows to and from dense memory, for every layout: what is read is what was written, and no other byte changes.
#include "server/pool/rows.h"

#include <algorithm>
#include <random>

#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {
namespace {

class RowsTest : public PoolTest {
 protected:
  // All bytes of the segment.
  static std::string Everything(const BlockHold& hold, const PoolSchema& schema) {
    std::vector<uint8_t*> row(1);
    hold.FillRows(0, 0, PlaneId::kK, 0, 1, row.data());
    const TensorSchema& k = schema.groups[0].layers[0].k;
    const uint8_t* const begin = row[0] - k.offset_bytes - 6 * k.block_stride_bytes;  // its first block is number 6
    return std::string(reinterpret_cast<const char*>(begin), schema.segments[0].size_bytes);
  }
};

TEST_F(RowsTest, EveryLayoutThereAndBack) {
  const Geometry g;
  const uint32_t tokens = 11;
  for (const std::string axes : {"lpbthd", "lbphtd", "blpthd", "lpbhtd", "lpbhdt", "lpbdth"}) {
    SCOPED_TRACE(axes);
    Restart(DefaultLimits());
    const PoolSchema schema = MakeSchema(axes, g);
    const std::string pool = Register(schema);
    std::mt19937 random(5);
    const auto hold = Target(pool, Blocks({{6, 1}, {1, 2}}), tokens);
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
      for (const PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
        const TensorOfHold tensor{0, layer, plane};
        ASSERT_EQ(DenseRowBytes(*hold, tensor), g.heads * g.head_dim * 2u);
        std::vector<uint8_t> words(tokens * DenseRowBytes(*hold, tensor)), back(words.size());
        for (uint8_t& byte : words) byte = static_cast<uint8_t>(random());
        ASSERT_TRUE(WriteRows(*hold, tensor, 0, tokens, words.data()).ok());
        ASSERT_TRUE(ReadRows(*hold, tensor, 0, tokens, back.data()).ok());
        EXPECT_EQ(back, words);
        const std::string before = Everything(*hold, schema);
        const uint64_t row = DenseRowBytes(*hold, tensor);
        std::vector<uint8_t> some(4 * row, 0xEE);
        ASSERT_TRUE(WriteRows(*hold, tensor, 3, 4, some.data()).ok());
        ASSERT_TRUE(ReadRows(*hold, tensor, 0, tokens, back.data()).ok());
        std::copy(some.begin(), some.end(), words.begin() + static_cast<ptrdiff_t>(3 * row));
        EXPECT_EQ(back, words);
        const std::string after = Everything(*hold, schema);
        size_t changed = 0;
        for (size_t i = 0; i < after.size(); ++i) changed += before[i] != after[i];
        EXPECT_LE(changed, some.size()) << "and nothing else";
        EXPECT_GT(changed, some.size() / 2);
      }
    }
  }
}

TEST_F(RowsTest, TheDenseSchemaHasDenseRows) {
  const PoolSchema dense = DenseSchema(MakeSchema("lpbhdt"));
  for (const LayerSchema& layer : dense.groups[0].layers) {
    for (const TensorSchema& tensor : {layer.k, *layer.v}) {
      EXPECT_EQ(tensor.dim_stride_bytes, 2u);
      EXPECT_EQ(tensor.head_stride_bytes, 16 * 2u);
      EXPECT_EQ(tensor.token_stride_bytes, 2 * 16 * 2u);
    }
  }
}

}  // namespace
}  // namespace spectrumkv
