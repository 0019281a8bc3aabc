// Estimates of rates: what a sample counts, what fades, what a mixture teaches, and what is not known.
#include "server/transfer/rates.h"

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backends.h"
#include "server/transfer/calibrate.h"

namespace spectrumkv {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr double kMiB = 1 << 20;

TEST(RateEstimate, IsUnknownUntilOneMebibyteWasSeen) {
  RateEstimate estimate;
  EXPECT_FALSE(estimate.rate().has_value());
  for (int i = 0; i < 15; ++i) estimate.Add(kMiB / 16, 1, 0);
  EXPECT_FALSE(estimate.rate().has_value()) << "15/16 MiB";
  estimate.Add(kMiB / 16, 1, 0);
  ASSERT_TRUE(estimate.rate().has_value());
  EXPECT_NEAR(*estimate.rate(), kMiB / 16, 1);
}

TEST(RateEstimate, IgnoresWhatIsNoMeasurement) {
  RateEstimate estimate;
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const auto& [bytes, seconds] : {std::pair{0.0, 1.0},
                                       {100 * kMiB, 0.0},
                                       {-kMiB, 1.0},
                                       {100 * kMiB, -1.0},
                                       {nan, 1.0},
                                       {100 * kMiB, nan},
                                       {inf, 1.0},
                                       {100 * kMiB, inf}}) {
    estimate.Add(bytes, seconds, 0);
    EXPECT_FALSE(estimate.rate().has_value()) << bytes << " bytes in " << seconds << " s";
  }
}

TEST(RateEstimate, TinySamplesMoveItLittle) {
  RateEstimate estimate;
  for (int i = 0; i < 10; ++i) estimate.Add(64 * kMiB, 0.064, 0);  // 1000 MiB/s
  const double before = *estimate.rate();
  // A hundred transfers of 4 KiB that took 1 ms each: 4 MiB/s if they were believed.
  for (int i = 0; i < 100; ++i) estimate.Add(4096, 1e-3, 0);
  EXPECT_GT(*estimate.rate(), 0.95 * before);
  // The same bytes in one sample are believed more, but not at once.
  estimate.Add(16 * kMiB, 4, 0);
  EXPECT_LT(*estimate.rate(), 0.7 * before);
  EXPECT_GT(*estimate.rate(), 0.2 * before) << "one sample alone does not settle it";
}

TEST(RateEstimate, FollowsAChangeWithinAFewTransfersInBothDirections) {
  for (const double factor : {10.0, 0.1}) {
    RateEstimate estimate;
    for (int i = 0; i < 20; ++i) estimate.Add(32 * kMiB, 0.32, i * kSecond);  // 100 MiB/s
    int transfers = 0;
    while (std::abs(std::log(*estimate.rate() / (100 * kMiB * factor))) > std::log(1.2)) {
      estimate.Add(32 * kMiB, 0.32 / factor, (20 + transfers) * kSecond);
      ASSERT_LT(++transfers, 8) << "factor " << factor << ": at " << *estimate.rate() / kMiB << " MiB/s";
    }
    EXPECT_GE(transfers, 2) << "not one alone";
  }
}

TEST(RateEstimate, OldSamplesFade) {
  RateEstimate estimate;
  for (int i = 0; i < 20; ++i) estimate.Add(32 * kMiB, 0.32, 0);
  RateEstimate later = estimate;
  estimate.Add(4 * kMiB, 0.4, kSecond);      // 10 MiB/s, a second afterwards
  later.Add(4 * kMiB, 0.4, 1000 * kSecond);  // long afterwards
  EXPECT_GT(*estimate.rate(), 70 * kMiB);
  EXPECT_NEAR(*later.rate(), 10 * kMiB, kMiB);
  EXPECT_DOUBLE_EQ(later.Age(1003 * kSecond), 3);
}

TEST(FamilyEstimate, LearnsFamiliesApartAndThenFromMixtures) {
  FamilyEstimate estimate;
  const auto raw = [](const FamilyRates& r) { return r[static_cast<size_t>(TierFamily::kRaw)]; };
  const auto rotated = [](const FamilyRates& r) { return r[static_cast<size_t>(TierFamily::kRotated)]; };
  estimate.Add({1 * kMiB, 0, 31 * kMiB}, 0.32, 0);
  EXPECT_FALSE(raw(estimate.rates()).has_value()) << "a few RAW sinks say nothing of RAW";
  EXPECT_FALSE(estimate.rates()[static_cast<size_t>(TierFamily::kPlain)].has_value());
  ASSERT_TRUE(rotated(estimate.rates()).has_value());
  EXPECT_NEAR(*rotated(estimate.rates()), 100 * kMiB, kMiB);
  estimate.Add({32 * kMiB, 0, 0}, 0.032, 0);
  EXPECT_NEAR(*raw(estimate.rates()), 1000 * kMiB, kMiB);
  // Half and half, both twice as slow as known: each is seen to be slower, and they keep their ratio.
  for (int i = 0; i < 12; ++i) estimate.Add({32 * kMiB, 0, 32 * kMiB}, 2 * (0.032 + 0.32), i * kSecond);
  EXPECT_NEAR(*rotated(estimate.rates()), 50 * kMiB, 3 * kMiB);
  EXPECT_NEAR(*raw(estimate.rates()), 500 * kMiB, 30 * kMiB);
}

SentSample Sample(Limit limit, double mib, double wall, double network) {
  SentSample sample;
  sample.peer = "p:1";
  sample.limit = limit;
  sample.wire_bytes = mib * kMiB;
  sample.wall_seconds = wall;
  sample.network_seconds = network;
  return sample;
}

TEST(RateBook, ALinkThatHeldATransferUpIsMeasured) {
  RateBook book(2, 0);
  EXPECT_FALSE(book.Of("p:1", CodedBy::kCpu, 0).link.has_value());
  const auto seen = book.LearnSent(Sample(Limit::kLink, 16, 0.16, 0.1), 0);
  ASSERT_TRUE(seen.has_value());
  EXPECT_NEAR(*seen, 100 * kMiB, 1);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, 0).link, 100 * kMiB, 1);
  EXPECT_FALSE(book.Of("q:1", CodedBy::kCpu, 0).link.has_value()) << "another peer's";
}

TEST(RateBook, ATransferThatSomethingElseHeldUpGivesAGuessUntilTheLinkIsMeasured) {
  RateBook book(2, 0);
  // 16 MiB in 1.6 s, but the network had chunks for 0.016 s of it only.
  book.LearnSent(Sample(Limit::kEncode, 16, 1.6, 0.016), 0);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, 0).link, 1000 * kMiB, 1) << "optimistic: trying it corrects it";
  book.LearnSent(Sample(Limit::kLink, 16, 0.16, 0.16), kSecond);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, kSecond).link, 100 * kMiB, 1) << "a measurement throws the guess away";
  book.LearnSent(Sample(Limit::kEncode, 16, 1.6, 0.016), 2 * kSecond);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, 2 * kSecond).link, 100 * kMiB, 1) << "a guess does not undo a measurement";
  book.LearnSent(Sample(Limit::kEncode, 16, 0.08, 0.016), 3 * kSecond);
  EXPECT_GT(*book.Of("p:1", CodedBy::kCpu, 3 * kSecond).link, 120 * kMiB) << "but what was moved was moved";
  book.LearnSent(Sample(Limit::kEncode, 16, 1.6, 0.016), 1000 * kSecond);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, 1000 * kSecond).link, 1000 * kMiB, 1) << "old measurements give way";
}

TEST(RateBook, SmallTransfersSayNothingOfTheLink) {
  RateBook book(2, 0);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(book.LearnSent(Sample(Limit::kLink, 0.2, 0.003, 0.001), 0).has_value());
  }
  EXPECT_FALSE(book.Of("p:1", CodedBy::kCpu, 0).link.has_value());
}

TEST(RateBook, WithoutAPeerTheSlowestLinkCounts) {
  RateBook book(2, 0);
  EXPECT_FALSE(book.Of("", CodedBy::kCpu, 0).link.has_value());
  SentSample sample = Sample(Limit::kLink, 16, 0.16, 0.1);
  book.LearnSent(sample, 0);
  sample.peer = "slow:1";
  sample.wall_seconds = 1.6;
  book.LearnSent(sample, 0);
  EXPECT_NEAR(*book.Of("", CodedBy::kCpu, 0).link, 10 * kMiB, 1);
}

TEST(RateBook, RemembersABoundedNumberOfPeers) {
  RateBook book(2, 0);
  SentSample sample = Sample(Limit::kLink, 16, 0.16, 0.1);
  for (size_t i = 0; i < RateBook::kMaxPeers + 10; ++i) {
    sample.peer = "peer:" + std::to_string(i);
    book.LearnSent(sample, static_cast<int64_t>(i));
  }
  EXPECT_FALSE(book.Of("peer:0", CodedBy::kCpu, 0).link.has_value()) << "not heard of for longest";
  EXPECT_FALSE(book.Of("peer:9", CodedBy::kCpu, 0).link.has_value());
  EXPECT_TRUE(book.Of("peer:10", CodedBy::kCpu, 0).link.has_value());
  EXPECT_TRUE(book.Of("peer:" + std::to_string(RateBook::kMaxPeers + 9), CodedBy::kCpu, 0).link.has_value());
}

TEST(RateBook, SetupIsTheQuickestOfTheRecentOnes) {
  RateBook book(2, 0);
  SentSample sample = Sample(Limit::kPeer, 0, 0, 0);
  const auto learn = [&](double seconds) {
    sample.setup_seconds = seconds;
    book.LearnSent(sample, 0);
    return book.Of("p:1", CodedBy::kCpu, 0).setup_seconds;
  };
  EXPECT_FALSE(learn(0.6).has_value()) << "a wait for the peer's worker";
  EXPECT_NEAR(*learn(0.1), 0.1, 1e-9);
  EXPECT_NEAR(*learn(0.003), 0.003, 1e-9);
  EXPECT_NEAR(*learn(0.1), 0.00375, 1e-9) << "grows slowly";
}

// A GPU and the CPU go at paces of their own, here and at the peer.
TEST(RateBook, AGpuHasAFigureOfItsOwn) {
  RateBook book(2, 0);
  const auto plain = static_cast<size_t>(TierFamily::kPlain), rotated = static_cast<size_t>(TierFamily::kRotated);
  const auto learn = [&](CodedBy by, size_t family, double seconds) {
    SentSample sample = Sample(Limit::kLink, 16, 0.16, 0.16);
    sample.by = sample.decoded_by = by;
    sample.kv_bytes = {};
    sample.kv_bytes[family] = 16 * kMiB;
    sample.encode_seconds = sample.decode_seconds = sample.scan_seconds = seconds;
    sample.sample_seconds = sample.attend_seconds = seconds;
    sample.attended_bytes = 16 * kMiB;
    book.LearnSent(sample, 0);
    book.LearnDecoded(by, sample.kv_bytes, seconds, 0);
  };
  learn(CodedBy::kCpu, plain, 0.016);
  learn(CodedBy::kCpu, rotated, 0.016);
  EXPECT_FALSE(book.StagesOf(CodedBy::kGpu).encode[plain].has_value());
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kGpu, 0).encode[plain], 1000 * kMiB, 1) << "as the CPU until it is measured";
  learn(CodedBy::kGpu, plain, 0.00016);
  const Measured cpu = book.Of("p:1", CodedBy::kCpu, 0), gpu = book.Of("p:1", CodedBy::kGpu, 0);
  for (const auto& [rates, expected] : {std::pair(&cpu, 1000.0), std::pair(&gpu, 100000.0)}) {
    EXPECT_NEAR(*rates->encode[plain] / kMiB, expected, 1e-6 * expected);
    EXPECT_NEAR(*rates->own_decode[plain] / kMiB, expected, 1e-6 * expected);
    EXPECT_NEAR(*rates->scan / kMiB, expected, 1e-6 * expected);
    EXPECT_NEAR(*rates->sample / kMiB, expected, 1e-6 * expected);
    EXPECT_NEAR(*rates->attend / kMiB, expected, 1e-6 * expected);
    EXPECT_NEAR(*rates->encode[rotated] / kMiB, 1000, 1e-3) << "only the CPU was seen at these";
    EXPECT_NEAR(*rates->peer_decode[plain] / kMiB, 100000, 0.1) << "as the peer decoded last";
  }
  EXPECT_FALSE(book.StagesOf(CodedBy::kGpu).encode[rotated].has_value());
  learn(CodedBy::kCpu, plain, 0.016);
  EXPECT_NEAR(*book.Of("p:1", CodedBy::kCpu, 0).peer_decode[plain] / kMiB, 1000, 1e-3);
}

TEST(PeerKey, AcceptedPeersAreKnownWithoutTheirPort) {
  EXPECT_EQ(PeerKey("10.0.0.2:7420", true), "10.0.0.2:7420");
  EXPECT_EQ(PeerKey("ipv4:10.0.0.2:53124", false), "ipv4:10.0.0.2");
  EXPECT_EQ(PeerKey("ipv6:%5B::1%5D:53124", false), "ipv6:%5B::1%5D");
  EXPECT_EQ(PeerKey("b", false), "b");
}

TEST(MeasureStages, KnowsEveryFamilyFromTheStart) {
  const std::unique_ptr<Clock> clock = NewSystemClock();
  const StageSpeeds speeds = MeasureStages(*ScalarBackend(), clock.get());
  EXPECT_GT(speeds.scan_seconds, 0);
  EXPECT_GT(speeds.sample_seconds, 0);
  EXPECT_GT(speeds.sampled_kv_bytes, 0);
  EXPECT_GT(speeds.attend_seconds, 0);
  RateBook book(2, 0);
  book.LearnAttended(speeds.attended_bytes, speeds.attend_seconds, 0);
  EXPECT_NEAR(book.Of("p:1", CodedBy::kCpu, 0).attend.value_or(0) * speeds.attend_seconds / speeds.attended_bytes, 1, 1e-9);
  for (size_t family = 0; family < kTierFamilies; ++family) {
    ByFamily bytes{};
    bytes[family] = speeds.kv_bytes;
    book.LearnEncoded(bytes, speeds.encode_seconds[family], 0);
    book.LearnDecoded(CodedBy::kCpu, bytes, speeds.decode_seconds[family], 0);
  }
  const Measured measured = book.Of("p:1", CodedBy::kCpu, 0);
  for (size_t family = 0; family < kTierFamilies; ++family) {
    EXPECT_GT(measured.encode[family].value_or(0), 0) << family;
    EXPECT_GT(measured.own_decode[family].value_or(0), 0) << family;
  }
  EXPECT_FALSE(measured.link.has_value());
}

}  // namespace
}  // namespace spectrumkv
