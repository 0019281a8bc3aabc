// One destination through any number of refinements, in random walks over what holds its cells (server/transfer/
// refinement.h): chunks arrive in any order, wait, are applied bit by bit, dropped; blocks go to others; room runs out. After
// each event every word, every tier and every byte of staging is where a model has it.
//
// SPECTRUMKV_WALK_SEED and SPECTRUMKV_REFINE_WALK_EVENTS choose another walk; a failure prints the seed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "server/transfer/refinement.h"
#include "server/transfer/shape.h"
#include "tests/unit/base/fake_clock.h"
#include "tests/unit/transfer/engine_fixture.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kEvents = 6000;
constexpr uint32_t kTokens = 150, kBlockTokens = 16, kBlocks = 10, kLayers = 2, kPlanesOfAll = 2 * kLayers;
constexpr PlaneId kPlanes[] = {PlaneId::kK, PlaneId::kV};
constexpr Tier kTiers[] = {Tier::kRaw, Tier::kQ8, Tier::kQ4, Tier::kQ2};

uint64_t NumberFrom(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

PoolLayout Layout(bool heads_first) {
  PoolLayout layout;
  layout.layers = kLayers;
  layout.heads = 2;
  layout.head_dim = 32;
  layout.block_tokens = kBlockTokens;
  layout.num_blocks = kBlocks;
  layout.heads_first = heads_first;
  return layout;
}
constexpr size_t kHeadBytes = 32 * 2, kRowBytes = 2 * kHeadBytes;

// Who wrote a row: the base, a refinement, somebody else's request.
std::string Words(uint32_t writer, size_t plane, uint32_t token) {
  uint64_t word = (uint64_t{writer} * 1'000 + plane) * 1'000 + token;
  std::string row(kRowBytes, '\0');
  for (size_t at = 0; at < row.size(); at += sizeof word) {
    word = (word + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9;
    word ^= word >> 29;
    std::memcpy(&row[at], &word, sizeof word);
  }
  return row;
}

// One refinement, and what the model knows of it.
struct Round {
  std::shared_ptr<Refinement> refinement;
  std::unique_ptr<BlockHold> target;
  uint32_t writer = 0;
  Tier tier = Tier::kRaw;
  bool direct = false, holds_room = false, dropped = false;
  std::vector<ChunkCut> cuts;
  std::set<uint32_t> coming, staged, applied;
  uint64_t applied_bytes = 0, stale_cells = 0, memory_bytes = 0;
};

class RefineWalk {
 public:
  explicit RefineWalk(uint64_t seed) : random_(seed), layout_(Layout(Chance(2))) {
    PoolLimits limits;
    limits.max_owned_bytes = 64 << 20;
    pools_ = PoolRegistry::Create(limits, 1, &clock_, {});
    pool_ = pools_->Register(kMe, "", MakeSchema(layout_), 600000)->pool_id;
    room_ = std::make_shared<StagingRoom>(Between(10, 900) * kRowBytes);
    MakeBase();
  }

  void Live(uint64_t events) {
    for (uint64_t i = 0; i < events && !testing::Test::HasFailure(); ++i) {
      Event();
      Check();
    }
    while (!rounds_.empty()) Forget(rounds_.begin());
    EXPECT_EQ(room_->used(), 0u) << "staging is left";
    const auto all = pools_->ReserveTarget(kMe, pool_, 1, {{0, {{0, kBlocks}}}}, 1);
    EXPECT_TRUE(all.ok()) << "a hold is left: " << all.status();
  }

  std::map<std::string, uint64_t> counts;

 private:
  using Rounds = std::vector<Round>;
  uint64_t Between(uint64_t least, uint64_t most) { return least + random_() % (most - least + 1); }
  bool Chance(uint32_t one_in) { return random_() % one_in == 0; }

  void WriteRow(const BlockHold& hold, size_t plane, uint32_t token, uint32_t writer) {
    uint8_t* row = nullptr;
    hold.FillRows(0, static_cast<uint32_t>(plane / 2), kPlanes[plane % 2], token, 1, &row);
    const std::string words = Words(writer, plane, token);
    const uint64_t head_stride = hold.schema().groups[0].layers[plane / 2].k.head_stride_bytes;
    for (size_t h = 0; h < 2; ++h) std::memcpy(row + h * head_stride, &words[h * kHeadBytes], kHeadBytes);
  }

  void MakeBase() {
    const auto hold = pools_->ReserveTarget(kMe, pool_, 1, {{0, {{0, kBlocks}}}}, kTokens);
    ASSERT_TRUE(hold.ok()) << hold.status();
    base_ = std::make_shared<RefineBase>();
    base_->transfer_id = "t";
    base_->schema = (*hold)->schema();
    base_->shape.token_count = kTokens;
    base_->shape.kept = {{0, kTokens}};
    base_->shape.layers = PlanLayersOf(base_->schema, &base_->places);
    base_->tiers = std::make_unique<TierMap>(base_->shape);
    base_->ticket = (*hold)->Ticket();
    for (size_t plane = 0; plane < kPlanesOfAll; ++plane) {
      writer_[plane].assign(kTokens, 0);
      for (uint32_t token = 0; token < kTokens; ++token) {
        tier_[plane].push_back(kTiers[random_() % std::size(kTiers)]);
        base_->tiers->SetCell(static_cast<uint32_t>(plane / 2), plane % 2 == 1, token, tier_[plane].back());
        WriteRow(**hold, plane, token, 0);
      }
    }
  }

  void Event() {
    const uint64_t dice = random_() % 100;
    if (rounds_.empty() || (dice < 8 && rounds_.size() < 6)) return Begin();
    Round& round = rounds_[random_() % rounds_.size()];
    if (dice < 60) return Arrive(&round);
    if (dice < 84) return Apply(&round);
    if (dice < 86) return Drop(&round);
    if (dice < 88 && Chance(3)) return TakeBlock();
    if (dice < 96 && round.coming.empty()) return Forget(rounds_.begin() + (&round - rounds_.data()));
  }

  void Begin() {
    Round round;
    round.direct = Chance(4);
    round.tier = kTiers[random_() % 3];
    round.writer = ++writers_;
    RefineSelection selection;
    if (Chance(2)) selection.tokens = {{static_cast<uint32_t>(random_() % 70), static_cast<uint32_t>(Between(1, 80))}};
    if (Chance(3)) selection.layers = {static_cast<uint32_t>(random_() % kLayers)};
    if (Chance(3)) {
      for (uint32_t t = 0; t < kTokens; ++t) selection.scores.push_back(static_cast<float>(random_() % 9));
    }
    RefineLimits limits;
    if (!round.direct) limits.kv_bytes = room_->left();
    auto choice = ChooseCells(base_->shape, *base_->tiers, selection, round.tier, limits);
    ASSERT_TRUE(choice.ok()) << choice.status();
    if (choice->cells == 0) return;
    round.memory_bytes = round.direct ? 0 : choice->kv_bytes;
    EXPECT_LE(round.memory_bytes, room_->left());
    auto created = Refinement::Create(base_, *std::move(choice), round.tier, round.direct ? nullptr : room_, false);
    ASSERT_TRUE(created.ok()) << created.status();
    round.refinement = *created;
    auto target = round.refinement->NewTarget();
    if (!target.ok()) {
      EXPECT_TRUE(round.direct && (direct_ || !stale_.empty())) << target.status();
      ++counts["direct refused: " + ReasonOf(target.status())];
      return;
    }
    round.target = *std::move(target);
    round.holds_room = !round.direct;
    direct_ |= round.direct;
    round.cuts = CutChunks(round.refinement->choice().shape);
    for (const ChunkCut& cut : round.cuts) round.coming.insert(cut.chunk_index);
    ++counts[round.direct ? "direct" : "staged"];
    rounds_.push_back(std::move(round));
  }

  // Plane and tokens of a chunk.
  template <typename Fn>
  void ForEachCell(const Round& round, const ChunkCut& cut, Fn fn) {
    const RefineChoice& choice = round.refinement->choice();
    const RefineChoice::Strip& strip = choice.strips[cut.layer_index];
    ForEachRun(choice.rows[cut.layer_index], cut.token_first, cut.token_count, [&](uint32_t row, uint32_t count, uint32_t) {
      for (uint32_t i = 0; i < count; ++i) fn(strip.layer_index * 2 + (strip.values ? 1 : 0), row + i);
    });
  }

  void Arrive(Round* round) {
    if (round->coming.empty() || round->target == nullptr) return;
    auto at = round->coming.begin();
    std::advance(at, random_() % round->coming.size());
    const ChunkCut cut = round->cuts[*at];
    round->coming.erase(at);
    const std::vector<uint8_t> tiers(cut.token_count, static_cast<uint8_t>(round->tier));
    if (!round->dropped) {
      ForEachCell(*round, cut, [&](size_t plane, uint32_t token) { WriteRow(*round->target, plane, token, round->writer); });
    }
    round->refinement->Arrived(cut, tiers.data());
    if (round->direct) {
      Land(round, cut);
      round->applied.insert(cut.chunk_index);
      if (round->coming.empty()) EndDirect(round);
    } else if (!round->dropped) {
      round->staged.insert(cut.chunk_index);
    }
  }

  // In the model. Answers the bytes that were written.
  uint64_t Land(Round* round, const ChunkCut& cut) {
    uint64_t bytes = 0;
    ForEachCell(*round, cut, [&](size_t plane, uint32_t token) {
      if (stale_.count(token / kBlockTokens) != 0) {
        ++round->stale_cells;
      } else if (IsFiner(round->tier, tier_[plane][token])) {
        tier_[plane][token] = round->tier;
        writer_[plane][token] = round->writer;
        bytes += kRowBytes;
      }
    });
    round->applied_bytes += bytes;
    return bytes;
  }

  void EndDirect(Round* round) {
    if (round->target == nullptr) return;
    round->target.reset();
    direct_ = false;
  }

  void Apply(Round* round) {
    const uint64_t most = Chance(3) ? 0 : Between(1, 100) * kRowBytes;
    const auto applied = round->refinement->Apply(most);
    const std::string reason = ReasonOf(applied.status());
    if (!applied.ok()) {
      ++counts["apply: " + reason];
      const std::string expected = round->direct ? "NOT_STAGED" : round->dropped ? "REFINEMENT_DROPPED"
                                 : stale_.size() == kBlocks                      ? "BLOCKS_REUSED"
                                                                                 : "BLOCKS_IN_USE";
      EXPECT_EQ(reason, expected) << applied.status();
      EXPECT_TRUE(reason != "BLOCKS_IN_USE" || direct_);
      return;
    }
    EXPECT_FALSE(round->direct);
    uint64_t asked = 0, bytes = 0;
    const uint64_t stale = round->stale_cells;
    while (!round->staged.empty()) {
      const ChunkCut& cut = round->cuts[*round->staged.begin()];
      asked += cut.token_count * kRowBytes;
      if (most != 0 && asked > most && asked > cut.token_count * kRowBytes) break;
      bytes += Land(round, cut);
      round->applied.insert(cut.chunk_index);
      round->staged.erase(cut.chunk_index);
    }
    EXPECT_EQ(applied->bytes, bytes);
    EXPECT_EQ(applied->stale_cells, round->stale_cells - stale);
    if (round->applied.size() == round->cuts.size()) round->holds_room = false;
    ++counts["applied"];
  }

  void Drop(Round* round) {
    if (round->direct) return EndDirect(round);
    int closed = 0;
    round->refinement->Close([&closed] { ++closed; });
    EXPECT_EQ(closed, 1) << "nobody applies";
    if (round->applied.size() < round->cuts.size()) round->dropped = true;
    round->holds_room = false;
    round->staged.clear();
    ++counts["dropped"];
  }

  void Forget(Rounds::iterator round) {
    if (round->direct) EndDirect(&*round);
    round->target.reset();
    rounds_.erase(round);
    ++counts["forgotten"];
  }

  // Another request has it, or its worker puts something there.
  void TakeBlock() {
    const uint64_t block = random_() % kBlocks;
    auto hold = pools_->ReserveTarget(kMe, pool_, 1, {{0, {{block, 1}}}}, kBlockTokens);
    EXPECT_EQ(hold.ok(), !direct_ || stale_.count(block) != 0) << hold.status();
    if (!hold.ok()) return;
    stale_.insert(block);
    const uint32_t writer = ++writers_;
    for (size_t plane = 0; plane < kPlanesOfAll; ++plane) {
      for (uint32_t i = 0; i < kBlockTokens; ++i) {
        const uint32_t token = static_cast<uint32_t>(block) * kBlockTokens + i;
        if (token >= kTokens) continue;
        uint8_t* row = nullptr;
        (*hold)->FillRows(0, static_cast<uint32_t>(plane / 2), kPlanes[plane % 2], i, 1, &row);
        const std::string words = Words(writer, plane, token);
        const uint64_t head_stride = (*hold)->schema().groups[0].layers[plane / 2].k.head_stride_bytes;
        for (size_t h = 0; h < 2; ++h) std::memcpy(row + h * head_stride, &words[h * kHeadBytes], kHeadBytes);
        writer_[plane][token] = writer;
      }
    }
    ++counts["blocks taken"];
  }

  void Check() {
    uint64_t room = 0;
    for (const Round& round : rounds_) {
      room += round.holds_room ? round.memory_bytes : 0;
      TransferReport report;
      round.refinement->AddTo(&report);
      uint64_t staged = 0;
      for (const uint32_t chunk : round.staged) staged += round.cuts[chunk].token_count * kRowBytes;
      EXPECT_EQ(report.staged_bytes, staged);
      EXPECT_EQ(report.applied_bytes, round.applied_bytes);
      EXPECT_EQ(report.stale_cells, round.stale_cells);
      EXPECT_EQ(round.refinement->complete(), round.applied.size() == round.cuts.size());
    }
    EXPECT_EQ(room_->used(), room) << "bytes of staging";
    for (size_t plane = 0; plane < kPlanesOfAll && !testing::Test::HasFailure(); ++plane) CheckPlane(plane);
  }

  void CheckPlane(size_t plane) {
    const auto layer = static_cast<uint32_t>(plane / 2);
    auto hold = pools_->HoldSource(kMe, pool_, 1, {{0, {{0, kBlocks}}}}, kTokens);
    if (!hold.ok()) return;  // a direct one has them
    const uint64_t head_stride = base_->schema.groups[0].layers[layer].k.head_stride_bytes;
    std::vector<uint8_t*> rows(kTokens);
    (*hold)->FillRows(0, layer, kPlanes[plane % 2], 0, kTokens, rows.data());
    for (uint32_t token = 0; token < kTokens; ++token) {
      EXPECT_EQ(base_->tiers->At(layer, plane % 2 == 1, token), tier_[plane][token]) << "token " << token;
      const std::string words = Words(writer_[plane][token], plane, token);
      for (size_t h = 0; h < 2; ++h) {
        EXPECT_EQ(std::memcmp(rows[token] + h * head_stride, &words[h * kHeadBytes], kHeadBytes), 0)
            << "token " << token << " of plane " << plane << " is not as writer " << writer_[plane][token] << " left it";
      }
    }
  }

  std::mt19937_64 random_;
  const PoolLayout layout_;
  FakeClock clock_;
  std::unique_ptr<PoolRegistry> pools_;
  std::string pool_;
  std::shared_ptr<StagingRoom> room_;
  std::shared_ptr<RefineBase> base_;
  Rounds rounds_;
  bool direct_ = false;       // a direct one has the blocks
  std::set<uint64_t> stale_;  // blocks that others have had
  uint32_t writers_ = 0;
  std::vector<uint32_t> writer_[kPlanesOfAll];
  std::vector<Tier> tier_[kPlanesOfAll];
};

TEST(RefineWalk, RandomWalksKeepEveryWordWhereItBelongs) {
  const uint64_t wanted = NumberFrom("SPECTRUMKV_REFINE_WALK_EVENTS", kEvents);
  uint64_t seed = NumberFrom("SPECTRUMKV_WALK_SEED", std::random_device()());
  std::map<std::string, uint64_t> counts;
  constexpr uint64_t kOfOne = 200;
  for (uint64_t events = 0; events < wanted; events += kOfOne, ++seed) {
    SCOPED_TRACE("SPECTRUMKV_WALK_SEED=" + std::to_string(seed));
    RefineWalk walk(seed);
    walk.Live(kOfOne);
    for (const auto& [what, count] : walk.counts) counts[what] += count;
    if (HasFailure()) {
      ADD_FAILURE() << "failed with SPECTRUMKV_WALK_SEED=" << seed;
      return;
    }
  }
  for (const auto& [what, count] : counts) std::printf("  %8llu %s\n", static_cast<unsigned long long>(count), what.c_str());
  if (wanted < kEvents) return;
  for (const char* what : {"direct", "staged", "applied", "dropped", "forgotten", "blocks taken", "apply: NOT_STAGED",
                           "apply: BLOCKS_IN_USE", "apply: REFINEMENT_DROPPED"}) {
    EXPECT_GT(counts[what], 0u) << what << ": the walk has become too tame to prove anything";
  }
}

}  // namespace
}  // namespace spectrumkv
