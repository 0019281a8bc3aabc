// What a BlockHold does with memory: addresses, tails, generations, and which blocks it may have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "server/memory/mapping.h"
#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {
namespace {

class HoldTest : public PoolTest {
 protected:
  // With a generation for each of its eight blocks behind them.
  static PoolSchema SchemaWithGenerations() {
    PoolSchema schema = MakeSchema("lpbthd");
    const uint64_t at = schema.segments[0].size_bytes;
    schema.segments[0].size_bytes += 8 * 8;
    schema.generations = PoolSchema::Generations{0, at};
    return schema;
  }
  // Registers `schema` over shared memory and maps the same memory here.
  std::string RegisterShm(PoolSchema schema, int fill = 1) {
    object_ = std::make_unique<ShmObject>(schema.segments[0].size_bytes, fill);
    schema.segments[0].kind = SegmentSpec::Kind::kPosixShm;
    schema.segments[0].name = object_->name();
    auto mapping = OpenShmSegment(object_->name(), "/", schema.segments[0].size_bytes, {kMe.uid()});
    EXPECT_TRUE(mapping.ok());
    mapping_ = *std::move(mapping);
    return Register(schema);
  }
  static uint64_t OffsetOf(const TensorSchema& t, uint64_t b, uint64_t token, uint64_t h, uint64_t d) {
    return t.offset_bytes + b * t.block_stride_bytes + token * t.token_stride_bytes + h * t.head_stride_bytes +
           d * t.dim_stride_bytes;
  }
  std::unique_ptr<ShmObject> object_;
  std::unique_ptr<Mapping> mapping_;
};

TEST_F(HoldTest, RowsAreTheStrideFormulaForAnyLayoutAndBlockTable) {
  std::mt19937 random(11);
  const auto pick = [&random](uint32_t least, uint32_t most) {
    return std::uniform_int_distribution<uint32_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    Geometry g{pick(1, 3), pick(1, 3), 8 * pick(1, 3), pick(1, 19), pick(1, 40), pick(0, 1) ? DType::kFloat32 : DType::kFloat16};
    std::string axes = "bdhlpt";
    std::shuffle(axes.begin(), axes.end(), random);
    const PoolSchema schema = MakeSchema(axes, g);
    const std::string pool = RegisterShm(schema);
    std::vector<uint64_t> table(g.num_blocks);
    std::iota(table.begin(), table.end(), uint64_t{0});
    std::shuffle(table.begin(), table.end(), random);
    std::vector<BlockRange> runs;
    for (const uint64_t block : table) runs.push_back({block, 1});
    const auto tokens = static_cast<uint32_t>(g.num_blocks * g.block_tokens) - pick(0, g.block_tokens - 1);
    const auto hold = Source(pool, Blocks(runs), tokens);
    ASSERT_NE(hold, nullptr);
    // The daemon maps the segment elsewhere: addresses count from row (0, 0) of the first layer's K.
    uint8_t* row0 = nullptr;
    hold->FillRows(0, 0, PlaneId::kK, 0, 1, &row0);
    const uint8_t* origin = row0 - OffsetOf(schema.groups[0].layers[0].k, table[0], 0, 0, 0);
    for (int call = 0; call < 20; ++call) {
      const uint32_t first = pick(0, tokens - 1), count = pick(0, tokens - first), layer = pick(0, g.layers - 1);
      const PlaneId plane = pick(0, 1) ? PlaneId::kV : PlaneId::kK;
      const LayerSchema& l = schema.groups[0].layers[layer];
      std::vector<uint8_t*> rows(count + 1, nullptr);
      hold->FillRows(0, layer, plane, first, count, rows.data());
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t t = first + i;
        const uint64_t at = OffsetOf(plane == PlaneId::kV ? *l.v : l.k, table[t / g.block_tokens], t % g.block_tokens, 0, 0);
        ASSERT_EQ(rows[i], origin + at) << axes << " token " << t;
      }
      ASSERT_EQ(rows[count], nullptr);
    }
    const auto status = registry_->List();
    ASSERT_EQ(status.size(), 1u);
    EXPECT_EQ(status[0].blocks_sending, g.num_blocks);
    Restart(DefaultLimits());
  }
}

TEST_F(HoldTest, RowsPointIntoTheSegment) {
  const PoolSchema schema = MakeSchema("lbpthd");
  const std::string pool = RegisterShm(schema);
  const auto hold = Source(pool, Blocks({{3, 2}}), 8);
  uint8_t* row = nullptr;
  hold->FillRows(0, 1, PlaneId::kV, 5, 1, &row);
  *row = 99;
  EXPECT_EQ(mapping_->data()[OffsetOf(*schema.groups[0].layers[1].v, 4, 1, 0, 0)], 99);
}

TEST_F(HoldTest, AHundredThousandScatteredBlocks) {
  Geometry g{1, 1, 8, 1, 100000};
  PoolLimits limits = DefaultLimits();
  limits.max_owned_bytes = 1 << 24;
  Restart(limits);
  const std::string pool = Register(MakeSchema("lpbthd", g));
  std::vector<BlockRange> runs;
  for (uint64_t i = 0; i < g.num_blocks; ++i) runs.push_back({i * 7919 % g.num_blocks, 1});  // coprime: each once
  auto hold = Target(pool, Blocks(runs), 100000);
  ASSERT_NE(hold, nullptr);
  std::vector<uint8_t*> rows(100000);
  hold->FillRows(0, 0, PlaneId::kK, 0, 100000, rows.data());
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i) ASSERT_EQ(rows[i] - rows[i - 1], 16);
  EXPECT_EQ(registry_->List()[0].blocks_receiving, 100000u);
  hold.reset();
  EXPECT_EQ(registry_->List()[0].blocks_receiving, 0u);
}

TEST_F(HoldTest, SkippedTokensAreOfSomebodyElse) {
  const PoolSchema schema = SchemaWithGenerations();
  const std::string pool = RegisterShm(schema, 0xAB);
  const std::vector<uint64_t> table = {6, 2, 3};
  const auto place = [&](const TensorSchema& tensor, uint32_t t) { return OffsetOf(tensor, table[t / 4], t % 4, 0, 0); };
  for (const uint32_t skip : {0u, 1u, 3u}) {
    const std::vector<GroupBlockList> blocks = {GroupBlockList{0, {{6, 1}, {2, 2}}, skip}};
    const uint32_t tokens = 7;
    const auto hold = Source(pool, blocks, tokens);
    ASSERT_NE(hold, nullptr);
    const TensorSchema& k = schema.groups[0].layers[1].k;
    for (uint32_t first = 0; first < tokens; ++first) {
      std::vector<uint8_t*> rows(tokens - first);
      hold->FillRows(0, 1, PlaneId::kK, first, tokens - first, rows.data());
      for (uint32_t i = 0; i < rows.size(); ++i) {
        ASSERT_EQ(rows[i] - rows[0], static_cast<int64_t>(place(k, skip + first + i)) - static_cast<int64_t>(place(k, skip + first)));
      }
      std::vector<uint64_t> seen;
      hold->ReadGenerations(0, first, 1, &seen);
      EXPECT_EQ(seen.size(), 1u);
    }
    std::vector<uint64_t> seen;
    hold->ReadGenerations(0, 0, tokens, &seen);
    EXPECT_EQ(seen.size(), (skip + tokens + 3) / 4) << "of all blocks that a token lies in";
    EXPECT_EQ(ReasonOfSource(pool, blocks, 13 - skip), "INVALID_BLOCKS") << "12 places, some of them skipped";
  }
  EXPECT_EQ(ReasonOfSource(pool, {GroupBlockList{0, {{6, 1}, {2, 2}}, 4}}, 1), "INVALID_BLOCKS") << "a whole block";
  EXPECT_EQ(ReasonOfSource(pool, {GroupBlockList{0, {{6, 1}}, UINT32_MAX}}, 1), "INVALID_BLOCKS");
  // The tail behind 2 + 3 tokens, and nothing before them.
  EXPECT_TRUE(Target(pool, {GroupBlockList{0, {{6, 1}, {2, 1}}, 2}}, 6)->ZeroTail(3).ok());
  for (const LayerSchema& layer : schema.groups[0].layers) {
    for (uint32_t t = 0; t < 8; ++t) {
      EXPECT_EQ(mapping_->data()[place(layer.k, t)], t < 5 ? 0xAB : 0) << t;
    }
  }
}

// Every byte of the pool is compared: the tail is zero, all else is as it was.
TEST_F(HoldTest, ZeroTailClearsTheTailAndNothingElse) {
  for (const std::string axes : {"lpbthd", "lbphtd", "blpthd", "bthdpl", "dbthlp"}) {
    for (const uint32_t kept : {0u, 1u, 3u, 4u, 5u, 7u, 8u}) {
      const Geometry g;
      const PoolSchema schema = MakeSchema(axes, g);
      const std::string pool = RegisterShm(schema, 0xAB);
      EXPECT_TRUE(Target(pool, Blocks({{6, 1}, {2, 1}}), 8)->ZeroTail(kept).ok());
      std::vector<uint8_t> expected(mapping_->size(), 0xAB);
      const uint64_t block = kept > 4 ? 2 : 6;
      for (const LayerSchema& layer : schema.groups[0].layers) {
        for (const TensorSchema& tensor : {layer.k, *layer.v}) {
          for (uint32_t t = kept % 4; t < 4 && kept % 4 != 0; ++t) {
            for (uint32_t h = 0; h < g.heads; ++h) {
              for (uint32_t d = 0; d < g.head_dim; ++d) std::memset(&expected[OffsetOf(tensor, block, t, h, d)], 0, 2);
            }
          }
        }
      }
      EXPECT_EQ(std::memcmp(expected.data(), mapping_->data(), expected.size()), 0) << axes << " kept " << kept;
      Restart(DefaultLimits());
    }
  }
}

TEST_F(HoldTest, GenerationsAreThoseOfTheTokensBlocks) {
  const PoolSchema schema = SchemaWithGenerations();
  const std::string pool = RegisterShm(schema);
  auto* table = reinterpret_cast<uint64_t*>(mapping_->data() + schema.generations->offset_bytes);
  for (uint64_t b = 0; b < 8; ++b) table[b] = 100 + b;
  const auto hold = Source(pool, Blocks({{5, 1}, {0, 2}}), 12);
  EXPECT_TRUE(hold->has_generations());
  const auto read = [&hold](uint32_t first, uint32_t count) {
    std::vector<uint64_t> out;
    hold->ReadGenerations(0, first, count, &out);
    return out;
  };
  EXPECT_EQ(read(0, 0), std::vector<uint64_t>());
  EXPECT_EQ(read(0, 1), std::vector<uint64_t>({105}));
  EXPECT_EQ(read(3, 1), std::vector<uint64_t>({105}));
  EXPECT_EQ(read(3, 2), std::vector<uint64_t>({105, 100}));
  EXPECT_EQ(read(0, 12), std::vector<uint64_t>({105, 100, 101}));
  table[0] = 777;
  EXPECT_EQ(read(4, 4), std::vector<uint64_t>({777}));

  const std::string plain = Register(MakeSchema("lpbthd"));
  const auto none = Source(plain, Blocks({{0, 1}}), 1);
  EXPECT_FALSE(none->has_generations());
  std::vector<uint64_t> out;
  none->ReadGenerations(0, 0, 1, &out);
  EXPECT_TRUE(out.empty());
}

TEST_F(HoldTest, ATicketGivesBackWhatNobodyHasHadSince) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  std::shared_ptr<BlockTicket> ticket = Target(pool, Blocks({{6, 1}, {2, 2}}), 12)->Ticket();
  ASSERT_NE(ticket, nullptr);
  EXPECT_EQ(Source(pool, Blocks({{6, 1}}), 4)->Ticket(), nullptr) << "a source has none";
  for (int again = 0; again < 3; ++again) {
    const auto hold = ticket->Reserve();
    ASSERT_TRUE(hold.ok()) << hold.status();
    for (uint32_t t = 0; t < 12; ++t) EXPECT_TRUE((*hold)->Fresh(0, t));
    EXPECT_EQ((*hold)->Ticket(), nullptr);
    EXPECT_EQ(ReasonOfTarget(pool, Blocks({{2, 1}}), 1), "BLOCKS_IN_USE");
    EXPECT_EQ(ReasonOf(ticket->Reserve().status()), "BLOCKS_IN_USE") << "the holder has them";
  }
  { Source(pool, Blocks({{6, 1}}), 4); }  // readers change nothing, and are in the way while they read
  {
    const auto reader = Source(pool, Blocks({{6, 1}}), 4);
    EXPECT_EQ(ReasonOf(ticket->Reserve().status()), "BLOCKS_IN_USE");
  }
  { Target(pool, Blocks({{2, 1}}), 1); }
  {
    const auto hold = ticket->Reserve();
    ASSERT_TRUE(hold.ok()) << hold.status();
    for (uint32_t t = 0; t < 12; ++t) EXPECT_EQ((*hold)->Fresh(0, t), t / 4 != 1) << t;
    EXPECT_EQ(ReasonOfTarget(pool, Blocks({{2, 1}}), 1), "OK") << "what is not the request's is free";
    EXPECT_EQ(ReasonOfTarget(pool, Blocks({{3, 1}}), 1), "BLOCKS_IN_USE");
  }
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{6, 1}, {2, 2}}), 12), "OK");
  EXPECT_EQ(ReasonOf(ticket->Reserve().status()), "BLOCKS_REUSED");
}

TEST_F(HoldTest, ATicketSeesGenerations) {
  const PoolSchema schema = SchemaWithGenerations();
  const std::string pool = RegisterShm(schema);
  auto* table = reinterpret_cast<uint64_t*>(mapping_->data() + schema.generations->offset_bytes);
  const std::shared_ptr<BlockTicket> ticket = Target(pool, Blocks({{5, 1}, {0, 2}}), 12)->Ticket();
  table[7] += 2;  // of somebody else
  EXPECT_TRUE((*ticket->Reserve())->Fresh(0, 11));
  table[1] += 2;  // the last page: a token was decoded into it, or it is another request's
  const auto hold = ticket->Reserve();
  ASSERT_TRUE(hold.ok()) << hold.status();
  for (uint32_t t = 0; t < 12; ++t) EXPECT_EQ((*hold)->Fresh(0, t), t < 8) << t;
}

TEST_F(HoldTest, BlockListsAtTheirEdges) {
  const std::string pool = Register(MakeSchema("lpbthd"));  // 8 blocks of 4 tokens
  struct Case {
    std::vector<BlockRange> runs;
    uint32_t tokens;
    const char* reason;
  };
  const std::vector<Case> cases = {
      {{{0, 1}}, 0, "INVALID_BLOCKS"},        {{{0, 1}}, 1, "OK"},
      {{{0, 1}}, 4, "OK"},                    {{{0, 1}}, 5, "INVALID_BLOCKS"},
      {{{0, 8}}, 32, "OK"},                   {{{0, 8}}, 33, "INVALID_BLOCKS"},
      {{{0, 8}}, UINT32_MAX, "INVALID_BLOCKS"}, {{{0, 8}}, 1, "OK"},
      {{{7, 1}}, 1, "OK"},                    {{{8, 1}}, 1, "UNKNOWN_BLOCK"},
      {{{7, 2}}, 1, "UNKNOWN_BLOCK"},         {{{0, 9}}, 1, "UNKNOWN_BLOCK"},
      {{{UINT64_MAX, 1}}, 1, "UNKNOWN_BLOCK"}, {{{1, UINT64_MAX}}, 1, "UNKNOWN_BLOCK"},
      {{{UINT64_MAX, UINT64_MAX}}, 1, "UNKNOWN_BLOCK"}, {{{0, 0}}, 1, "INVALID_BLOCKS"},
      {{{0, 8}, {0, 1}}, 1, "INVALID_BLOCKS"}, {{}, 1, "INVALID_BLOCKS"},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(ReasonOfSource(pool, Blocks(c.runs), c.tokens), c.reason) << c.tokens;
    EXPECT_EQ(ReasonOfTarget(pool, Blocks(c.runs), c.tokens), c.reason) << c.tokens;
  }
  EXPECT_EQ(ReasonOfSource(pool, {}, 1), "INVALID_BLOCKS");
  EXPECT_EQ(ReasonOfSource(pool, {GroupBlockList{1, {{0, 1}}}}, 1), "INVALID_BLOCKS");
  EXPECT_EQ(ReasonOfSource(pool, {GroupBlockList{0, {{0, 1}}}, GroupBlockList{0, {{1, 1}}}}, 1), "INVALID_BLOCKS");
  EXPECT_EQ(registry_->List()[0].blocks_sending + registry_->List()[0].blocks_receiving, 0u);
}

TEST_F(HoldTest, EveryGroupNeedsItsBlocks) {
  PoolSchema schema = MakeSchema("lpbthd");
  GroupSchema second = schema.groups[0];
  second.block_tokens = 2;
  for (LayerSchema& layer : second.layers) {
    layer.layer += 10;
    layer.k.segment = layer.v->segment = 1;
  }
  schema.groups.push_back(second);
  schema.segments.push_back(schema.segments[0]);
  const std::string pool = Register(schema);
  const auto lists = [](uint64_t a, uint64_t b) {
    return std::vector<GroupBlockList>{GroupBlockList{1, {{0, b}}}, GroupBlockList{0, {{0, a}}}};  // any order
  };
  EXPECT_EQ(ReasonOfSource(pool, lists(2, 4), 8), "OK");
  EXPECT_EQ(ReasonOfSource(pool, lists(2, 3), 8), "INVALID_BLOCKS");
  EXPECT_EQ(ReasonOfSource(pool, lists(1, 4), 8), "INVALID_BLOCKS");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{0, 2}}), 8), "INVALID_BLOCKS");
}

TEST_F(HoldTest, SourcesShareAndADestinationIsAlone) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  auto a = Source(pool, Blocks({{0, 2}}), 8);
  auto b = Source(pool, Blocks({{1, 2}}), 8);
  EXPECT_EQ(registry_->List()[0].blocks_sending, 3u);
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{2, 1}}), 1), "BLOCKS_IN_USE");
  a.reset();
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{1, 1}}), 1), "BLOCKS_IN_USE");
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{0, 1}}), 1), "OK");
  b.reset();
  auto target = Target(pool, Blocks({{0, 3}}), 12);
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{2, 2}}), 8), "BLOCKS_IN_USE");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{2, 2}}), 8), "BLOCKS_RESERVED");
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{3, 2}}), 8), "OK");
  target.reset();
  EXPECT_EQ(ReasonOfSource(pool, Blocks({{0, 3}}), 12), "OK");
}

TEST_F(HoldTest, ABlockTwiceInOneDestinationLeavesNothingReserved) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{0, 3}, {1, 1}}), 16), "INVALID_BLOCKS");
  EXPECT_EQ(registry_->List()[0].blocks_receiving, 0u);
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{0, 8}}), 32), "OK");
  // A source may repeat a block; each use is counted and given back.
  auto source = Source(pool, Blocks({{0, 3}, {1, 1}}), 16);
  EXPECT_EQ(registry_->List()[0].blocks_sending, 3u);
  source.reset();
  EXPECT_EQ(ReasonOfTarget(pool, Blocks({{0, 8}}), 32), "OK");
}

TEST_F(HoldTest, PutAndGetAreDenseWhateverTheLayout) {
  const Geometry g;
  for (const std::string axes : {"lpbthd", "lbphtd", "bthdpl", "dbthlp"}) {
    const PoolSchema schema = MakeSchema(axes, g);
    const std::string pool = RegisterShm(schema);
    std::string data(4 * 2 * 16 * 2, '\0');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 + 7);
    ASSERT_TRUE(registry_->PutBlock(kMe, pool, kEpoch, 0, 1, PlaneId::kV, 5, data).ok());
    auto got = registry_->GetBlock(kMe, pool, kEpoch, 0, 1, PlaneId::kV, 5);
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(*got, data);
    size_t i = 0;
    for (uint32_t t = 0; t < 4; ++t) {
      for (uint32_t h = 0; h < 2; ++h) {
        for (uint32_t d = 0; d < 16; ++d, i += 2) {
          ASSERT_EQ(std::memcmp(mapping_->data() + OffsetOf(*schema.groups[0].layers[1].v, 5, t, h, d), &data[i], 2), 0);
        }
      }
    }
    auto other = registry_->GetBlock(kMe, pool, kEpoch, 0, 1, PlaneId::kK, 5);
    EXPECT_EQ(*other, std::string(data.size(), 1));
    Restart(DefaultLimits());
  }
}

TEST_F(HoldTest, PutAndGetRefuse) {
  const std::string pool = Register(MakeSchema("lpbthd"));
  const std::string data(256, 'x');
  const auto put = [&](uint32_t group, uint32_t layer, uint64_t block, const std::string& bytes) {
    return ReasonOf(registry_->PutBlock(kMe, pool, kEpoch, group, layer, PlaneId::kK, block, bytes));
  };
  EXPECT_EQ(put(0, 0, 0, data), "");
  EXPECT_EQ(put(0, 0, 7, data), "");
  EXPECT_EQ(put(0, 0, 8, data), "UNKNOWN_BLOCK");
  EXPECT_EQ(put(0, 0, UINT64_MAX, data), "UNKNOWN_BLOCK");
  EXPECT_EQ(put(1, 0, 0, data), "INVALID_BLOCKS");
  EXPECT_EQ(put(0, 2, 0, data), "INVALID_BLOCKS");
  EXPECT_EQ(put(0, 0, 0, std::string(255, 'x')), "INVALID_BLOCKS");
  EXPECT_EQ(put(0, 0, 0, std::string(257, 'x')), "INVALID_BLOCKS");
  EXPECT_EQ(put(0, 0, 0, ""), "INVALID_BLOCKS");
  const auto get = [&] { return ReasonOf(registry_->GetBlock(kMe, pool, kEpoch, 0, 0, PlaneId::kK, 0).status()); };
  auto source = Source(pool, Blocks({{0, 1}}), 1);
  EXPECT_EQ(put(0, 0, 0, data), "BLOCKS_IN_USE");
  EXPECT_EQ(get(), "");
  source.reset();
  const auto target = Target(pool, Blocks({{0, 1}}), 1);
  EXPECT_EQ(put(0, 0, 0, data), "BLOCKS_IN_USE");
  EXPECT_EQ(get(), "BLOCKS_RESERVED");
}

}  // namespace
}  // namespace spectrumkv
