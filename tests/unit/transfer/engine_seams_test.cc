// Each seam alone, one fault at a time, and the end it must have: network, codec, source memory. All of them together,
// by seed: fault_seeds_test.cc.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>

#include "kernels/format/crc32c.h"
#include "tests/unit/metrics/exposition.h"
#include "tests/unit/pool/segments.h"
#include "tests/unit/transfer/simulation/faulty_backend.h"
#include "tests/unit/transfer/two_engines.h"

namespace spectrumkv {
namespace {

class SeamTest : public EngineTest {
 protected:
  struct Ends {
    TransferReport sent, received;
    bool committed() const {
      return sent.state == TransferState::kCommitted && received.state == TransferState::kCommitted;
    }
  };

  // `clock_` first: the network's delays need one.
  SeamTest() { network_ = std::make_unique<MemoryNetwork>(nullptr, clock_.get()); }
  // The engines before the backend and the clock, which are younger.
  void TearDown() override {
    EngineTest::TearDown();
    a_.reset();
    b_.reset();
    clock_->Stop();
  }

  void BuildOneStream() {
    EngineSettings settings;
    settings.options.streams = 1;
    settings.backend = &backend_;
    settings.reconstruction_chunks = 1;
    Build(settings);
    Prepare();
    Poison();
  }
  void Poison() {
    std::vector<uint64_t> blocks(10);
    std::iota(blocks.begin(), blocks.end(), uint64_t{10});
    before_ = FillBlocks(*b_, target_pool_, target_layout_, blocks, 99);
  }
  Ends Move(Policy policy, int64_t deadline_ms = 5000) { return Move(std::move(policy), deadline_ms, Source()); }
  Ends Move(Policy policy, int64_t deadline_ms, std::unique_ptr<BlockHold> source) {
    const std::string id = "t" + std::to_string(next_++);
    ReceiverSpec receiver = Expect(id, Target());
    SenderSpec sender = Send(id, std::move(source), std::move(policy));
    receiver.deadline_ms = sender.deadline_ms = deadline_ms;
    EXPECT_TRUE(b_->manager().StartReceiver(std::move(receiver)).ok());
    EXPECT_TRUE(a_->manager().StartSender(std::move(sender)).ok());
    return {a_->Watch(id, Role::kSender)->WaitTerminal(), b_->Watch(id, Role::kReceiver)->WaitTerminal()};
  }
  void ExpectTheNextIsServed() {
    network_->SetFaultHook(nullptr);
    backend_.SpoilEncoded(nullptr);
    const Ends ends = Move(Raw());
    ASSERT_TRUE(ends.committed()) << ends.sent.error << ends.received.error;
    EXPECT_TRUE(Landed() == sent_);
    Poison();
  }
  static void ExpectBoth(const Ends& ends, absl::StatusCode code, const std::set<std::string>& reasons) {
    for (const TransferReport* report : {&ends.sent, &ends.received}) {
      EXPECT_EQ(report->state, TransferState::kFailed);
      EXPECT_EQ(report->error.code(), code) << report->error;
      EXPECT_EQ(reasons.count(ReasonOf(report->error)), 1u) << report->error;
    }
  }
  // The `index`th chunk of the stream, once.
  void FaultAt(uint64_t index, const Fault& fault) {
    auto done = std::make_shared<std::atomic<bool>>(false);
    network_->SetFaultHook([=](const FaultPoint& point) {
      return point.data && point.index == index && !done->exchange(true) ? fault : Fault{};
    });
  }
  static Policy Uniform(Tier tier) {
    Policy policy;
    policy.allocator = Allocator::kUniform;
    policy.uniform_tier = tier;
    policy.sinks = 0;
    policy.budget = 1.1;
    return policy;
  }
  // Mean of the error of all tiers since the start: (sum, count).
  std::pair<double, double> Reconstruction() {
    std::pair<double, double> all;
    for (const auto& [name, value] : ParseExposition(a_->metrics().Render())) {
      if (name.rfind("spectrumkv_reconstruction_error_ratio_sum", 0) == 0) all.first += value;
      if (name.rfind("spectrumkv_reconstruction_error_ratio_count", 0) == 0) all.second += value;
    }
    return all;
  }
  // Of one transfer that must commit.
  double ErrorOf(const Policy& policy) {
    const auto [sum, count] = Reconstruction();
    const Ends ends = Move(policy);
    EXPECT_TRUE(ends.committed()) << ends.sent.error << ends.received.error;
    const auto [now_sum, now_count] = Reconstruction();
    EXPECT_GT(now_count, count) << "nothing was measured";
    return (now_sum - sum) / (now_count - count);
  }

  std::unique_ptr<Clock> clock_ = NewSystemClock();
  FaultyBackend backend_{ScalarBackend()};
  std::vector<std::string> before_;
  int next_ = 0;
};

TEST_F(SeamTest, WhatTheNetworkDoesToAChunk) {
  BuildOneStream();
  using Kind = Fault::Kind;
  for (const uint64_t index : {0, 1, 2}) {
    SCOPED_TRACE("chunk " + std::to_string(index));
    for (const Kind kind : {Kind::kDelay, Kind::kBreak, Kind::kHold}) {
      if (kind == Kind::kHold && index == 2) continue;  // there is none behind the last
      Fault fault{kind};
      fault.delay_ns = 300'000'000;
      FaultAt(index, fault);
      const Ends ends = Move(Raw());
      EXPECT_TRUE(ends.committed()) << ends.sent.error << ends.received.error;
      EXPECT_TRUE(Landed() == sent_);
      ExpectTheNextIsServed();
    }
    FaultAt(index, Fault{Kind::kDuplicate});
    const Ends twice = Move(Raw());
    // A copy beyond the credits is a violation; within them it is dropped.
    if (twice.committed()) {
      EXPECT_TRUE(Landed() == sent_);
    } else {
      EXPECT_EQ(ReasonOf(twice.received.error), "PROTOCOL_VIOLATION") << twice.received.error;
    }
    ExpectTheNextIsServed();
    FaultAt(index, Fault{Kind::kCorrupt, 0, 1, 777, 0x10});
    ExpectBoth(Move(Raw()), absl::StatusCode::kDataLoss, {"BAD_CHECKSUM"});
    ExpectTheNextIsServed();
  }
  // What was lost unseen does not arrive, and nobody says that it did.
  FaultAt(1, Fault{Kind::kDrop});
  const Ends lost = Move(Raw(), 1000);
  const std::string why = ReasonOf(lost.received.error);  // of its own deadline, or of the sender's, which is the same
  EXPECT_TRUE(why == "DEADLINE_EXCEEDED" || why == "PEER_GAVE_UP") << lost.received.error;
  EXPECT_NE(lost.received.state, TransferState::kCommitted);
  EXPECT_NE(lost.sent.state, TransferState::kCommitted);
  ExpectTheNextIsServed();
}

TEST_F(SeamTest, AChunkCutShortAnywhereIsRefused) {
  source_layout_.layers = target_layout_.layers = 1;
  BuildOneStream();
  const size_t whole = Move(Raw()).sent.wire_bytes;
  ExpectTheNextIsServed();
  const size_t header = kHeaderBytes;
  for (const size_t left : {size_t{0}, size_t{1}, header - 1, header, header + 1, header + 80, whole / 2, whole - 1}) {
    SCOPED_TRACE(left);
    FaultAt(0, Fault{Fault::Kind::kTruncate, 0, 1, left});
    ExpectBoth(Move(Raw()), absl::StatusCode::kDataLoss, {left < header ? "TRUNCATED" : "BAD_LENGTH"});
    EXPECT_TRUE(Landed() == before_) << "something was written";
    ExpectTheNextIsServed();
  }
}

// Of the frames that open, plan and end a transfer: no prefix of one is taken for another, and nobody waits for ever.
TEST_F(SeamTest, AFrameCutShortAnywhereEndsOrIsSentAgain) {
  progress_timeout_ms_ = 500;
  BuildOneStream();
  int cut = 0;
  for (const char* from : {"a", "b"}) {
    for (const uint64_t index : {0, 1}) {
      for (const size_t left : {0, 1, 2, 9, 33}) {
        SCOPED_TRACE(std::string(from) + " frame " + std::to_string(index) + " to " + std::to_string(left));
        std::atomic<bool> done{false};
        network_->SetFaultHook([&](const FaultPoint& point) {
          const bool here = !point.data && point.from == from && point.index == index && !done.exchange(true);
          return here ? Fault{Fault::Kind::kTruncate, 0, 1, left} : Fault{};
        });
        const Ends ends = Move(Raw(), 800);
        cut += done ? 1 : 0;
        EXPECT_TRUE(IsTerminal(ends.sent.state) && IsTerminal(ends.received.state));
        const bool received = ends.received.state == TransferState::kCommitted;
        EXPECT_TRUE(received || ends.sent.state != TransferState::kCommitted);
        EXPECT_TRUE(!received || Landed() == sent_);
        ExpectTheNextIsServed();
      }
    }
  }
  EXPECT_EQ(cut, 20);
}

// A backend, or memory behind it, that flips one bit of what it has coded: the receiver refuses before it decodes.
TEST_F(SeamTest, EveryBitThatACodecFlipsIsRefused) {
  source_layout_.layers = target_layout_.layers = 1;
  BuildOneStream();
  Policy greedy;
  greedy.allocator = Allocator::kGreedy;
  greedy.budget = 0.45;
  for (const Policy& policy : {Raw(), greedy, Uniform(Tier::kP8)}) {
    size_t bits = 0, flips = 0;
    for (size_t bit = 0; bit == 0 || bit < bits; bit += bit < 8 * kHeaderBytes ? 7 : 499) {
      std::atomic<size_t> size{0};
      backend_.SpoilEncoded([&](uint8_t* bytes, uint64_t chunk_bytes) {
        size = chunk_bytes;
        bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
      });
      const Ends ends = Move(policy);
      bits = 8 * size;
      ++flips;
      ASSERT_EQ(ends.sent.state, TransferState::kFailed) << "bit " << bit << " of " << bits;
      ASSERT_EQ(ends.received.state, TransferState::kFailed) << "bit " << bit << " of " << bits;
      const bool version = bit / 8 >= 4 && bit / 8 < 8;  // and the length of the header, which is the version's
      EXPECT_EQ(ends.received.error.code(), version ? absl::StatusCode::kUnimplemented : absl::StatusCode::kDataLoss)
          << "bit " << bit << ": " << ends.received.error;
    }
    EXPECT_TRUE(Landed() == before_) << "something was written";
    EXPECT_GT(flips, 80u) << bits << " bits";
    ExpectTheNextIsServed();
  }
}

// A backend that codes wrongly and says so of no checksum: only the sender can know, and its sampled error does.
TEST_F(SeamTest, WrongCodesUnderARightChecksumShowInTheSampledError) {
  BuildOneStream();
  // Flips `mask` of every `every`th byte of codes.
  const auto spoil = [](size_t every, uint8_t mask) {
    return [every, mask](uint8_t* bytes, uint64_t size) {
      ChunkView view;
      ASSERT_EQ(ParseChunk(bytes, size, &view), Refusal::kNone);
      for (const Section& section : view.layout.codes) {
        for (size_t at = 0; at < section.bytes; at += every) bytes[section.offset + at] ^= mask;
      }
      const uint32_t crc = Crc32c(Crc32c(0, bytes, 60), bytes + kHeaderBytes, size - kHeaderBytes);
      std::memcpy(bytes + 60, &crc, sizeof(crc));
    };
  };
  for (const Tier tier : {Tier::kP8, Tier::kQ8, Tier::kP4, Tier::kQ4, Tier::kQ3, Tier::kQ2}) {
    SCOPED_TRACE(TierName(tier));
    const double honest = ErrorOf(Uniform(tier));
    backend_.SpoilEncoded(spoil(1, 0x80));
    const double wrong = ErrorOf(Uniform(tier));
    EXPECT_GT(wrong, 1.3 * honest) << "the highest bit of every byte";
    std::printf("%s: error %.4f, with wrong bits %.4f", TierName(tier), honest, wrong);
    if (tier == Tier::kP8 || tier == Tier::kQ8) {
      // One bit of a section: 8-bit codes are good enough for that to show.
      backend_.SpoilEncoded(spoil(size_t{1} << 30, 0x80));
      const double one_bit = ErrorOf(Uniform(tier));
      EXPECT_GT(one_bit, 1.3 * honest);
      std::printf(", with one %.4f", one_bit);
    }
    std::puts("");
    backend_.SpoilEncoded(nullptr);
  }
}

// Blocks that their worker writes while they are sent, with generations to tell: old and new never mix.
class GenerationTest : public SeamTest {
 protected:
  void Start() {
    EngineSettings settings;
    settings.backend = &backend_;
    Build(settings);
    Prepare();
    PoolLayout layout = source_layout_;
    layout.generations = true;
    PoolSchema schema = MakeSchema(layout);
    const uint64_t bytes = schema.segments[0].size_bytes;
    segment_.emplace(bytes);
    schema.segments[0].kind = SegmentSpec::Kind::kPosixShm;
    schema.segments[0].name = segment_->name();
    source_pool_ = a_->AddPool(schema);
    sent_ = FillBlocks(*a_, source_pool_, source_layout_, {7, 3, 4, 20, 1}, 1);
    const int fd = shm_open(segment_->name().c_str(), O_RDWR, 0);
    mapped_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    ASSERT_NE(mapped_, MAP_FAILED);
    mapped_bytes_ = bytes;
    uint8_t* const table = static_cast<uint8_t*>(mapped_) + schema.generations->offset_bytes;
    table_ = reinterpret_cast<std::atomic<uint64_t>*>(table);
    for (uint64_t block = 0; block < layout.num_blocks; ++block) table_[block] = 2;
  }
  ~GenerationTest() override {
    if (mapped_bytes_ != 0) munmap(mapped_, mapped_bytes_);
  }
  // Once, between the two looks at the table that one chunk has.
  void WhileItIsGathered(std::function<void()> write) {
    auto done = std::make_shared<std::atomic<bool>>(false);
    backend_.SpoilEncoded([done, write = std::move(write)](uint8_t*, uint64_t) {
      if (!done->exchange(true)) write();
    });
  }
  void ExpectChanged(const Policy& policy) {
    ExpectBoth(Move(policy), absl::StatusCode::kFailedPrecondition, {"SOURCE_CHANGED"});
  }

  std::optional<ShmObject> segment_;
  void* mapped_ = nullptr;
  uint64_t mapped_bytes_ = 0;
  std::atomic<uint64_t>* table_ = nullptr;
};

TEST_F(GenerationTest, AnUnchangedSourceCommitsAndSaysHowItWasGuarded) {
  Start();
  for (const Policy& policy : {Raw(), Uniform(Tier::kQ8)}) {
    const Ends ends = Move(policy);
    EXPECT_TRUE(ends.committed()) << ends.sent.error;
    EXPECT_EQ(ends.sent.source_guard, "generations");
  }
}

TEST_F(GenerationTest, AWriteBeforeOrWhileAChunkIsGatheredFailsTheTransfer) {
  Start();
  for (const Policy& policy : {Raw(), Uniform(Tier::kQ8)}) {
    for (const uint64_t block : {7, 3, 4, 20, 1}) {  // the first and the last, too
      SCOPED_TRACE(block);
      ++table_[block];  // odd: is being written
      ExpectChanged(policy);
      ++table_[block];
      WhileItIsGathered([this, block] { table_[block] += 2; });  // begun and ended in between
      ExpectChanged(policy);
      WhileItIsGathered([this, block] { ++table_[block]; });
      ExpectChanged(policy);
      ++table_[block];
    }
    backend_.SpoilEncoded(nullptr);
    EXPECT_TRUE(Move(policy).committed()) << "calm again";
  }
}

TEST_F(GenerationTest, WritesElsewhereAndAfterwardsDoNotMatter) {
  Start();
  table_[5] = 3;  // of a block that is not sent
  WhileItIsGathered([this] { table_[6] += 2; });
  const Ends ends = Move(Raw());
  EXPECT_TRUE(ends.committed()) << ends.sent.error;
  EXPECT_TRUE(Landed() == sent_);
}

}  // namespace
}  // namespace spectrumkv
