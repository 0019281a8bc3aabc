// The numbers between two looks at a daemon, and the frame that shows them.
#include "client/ctl/top_view.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace spectrumkv::ctl {
namespace {

TEST(Exposition, SumsWhatFits) {
  const Exposition e = Exposition::Parse(
      "# HELP a words\n# TYPE a counter\na{x=\"1\",y=\"p\"} 3\na{x=\"1\",y=\"q\"} 4\na{x=\"2\",y=\"q\"} 5\n"
      "b 7.5\nc{v=\"a\\\"b\\\\,}\"} 1e3\nc{v=\"z\"} NaN-is-no-problem\nbroken{x=\"1\n\n{} 4\nnothing\n");
  EXPECT_EQ(e.Sum("a"), 12);
  EXPECT_EQ(e.Sum("a", {{"x", "1"}}), 7);
  EXPECT_EQ(e.Sum("a", {{"x", "1"}, {"y", "q"}}), 4);
  EXPECT_EQ(e.Sum("a", {{"z", "1"}}), 0);
  EXPECT_EQ(e.Sum("b"), 7.5);
  EXPECT_EQ(e.SumBy("a", {"x", "y"}), (std::map<std::string, double>{{"1 p", 3}, {"1 q", 4}, {"2 q", 5}}));
  EXPECT_EQ(e.SumBy("c", {"v"}).count("a\"b\\,}"), 1u);
  EXPECT_FALSE(e.Has("broken"));
  EXPECT_FALSE(e.Has("nothing"));
}

Look LookOf(double at, uint64_t epoch, const std::string& metrics) {
  Look look;
  look.at_seconds = at;
  look.status.set_epoch(epoch);
  look.status.set_version("1.0.0");
  look.status.set_backend("avx2");
  look.status.set_ready(true);
  look.metrics = Exposition::Parse(metrics);
  return look;
}

std::string Metrics(int factor) {
  const std::string f = std::to_string(factor), f4 = std::to_string(4 * factor);
  return "spectrumkv_kv_bytes_total{role=\"sender\"} " + f4 + "000000\nspectrumkv_wire_bytes_total{role=\"sender\"} " + f +
         "000000\nspectrumkv_kv_bytes_total{role=\"receiver\"} 0\nspectrumkv_wire_bytes_total{role=\"receiver\"} 0\n"
         "spectrumkv_transfers_total{role=\"sender\",outcome=\"committed\"} " + f4 +
         "\nspectrumkv_transfers_total{role=\"sender\",outcome=\"failed\"} " + f +
         "\nspectrumkv_tokens_total{role=\"sender\",tier=\"RAW\"} " + f + "\nspectrumkv_tokens_total{role=\"sender\",tier=\"Q4\"} " +
         std::to_string(3 * factor) + "\nspectrumkv_tokens_total{role=\"sender\",tier=\"Q2\"} 9\n" +
         "spectrumkv_errors_total{stage=\"queue\",code=\"unavailable\"} " + f +
         "\nspectrumkv_errors_total{stage=\"plan\",code=\"internal\"} 5\nspectrumkv_saved_bytes_total{role=\"sender\"} 3000\n";
}

TEST(Top, RatesAreDifferencesOverTime) {
  Look before = LookOf(10, 1, Metrics(2)), now = LookOf(14, 1, Metrics(10));
  v1::PeerInfo* peer = before.peers.add_peers();
  peer->set_address("10.0.0.2:7420");
  peer->set_direction("dialled");
  peer->set_wire_bytes_sent(100);
  *now.peers.add_peers() = *peer;
  now.peers.mutable_peers(0)->set_wire_bytes_sent(500);
  v1::PeerInfo* fresh = now.peers.add_peers();
  fresh->set_address("10.0.0.3:7420");
  fresh->set_wire_bytes_received(8000);
  const TopNumbers n = NumbersBetween(before, now);
  EXPECT_EQ(n.seconds, 4);
  EXPECT_FALSE(n.restarted);
  EXPECT_EQ(n.sender.kv_bytes, 8e6);
  EXPECT_EQ(n.sender.wire_bytes, 2e6);
  EXPECT_EQ(n.sender.ratio, 4);
  EXPECT_EQ(n.receiver.ratio, std::nullopt);
  EXPECT_EQ(n.sender.outcomes.at("committed"), 8);
  EXPECT_EQ(n.sender.outcomes.at("failed"), 2);
  EXPECT_EQ(n.sender.tier_share, (std::map<std::string, double>{{"Q4", 0.75}, {"RAW", 0.25}}));
  EXPECT_EQ(n.errors, (std::map<std::string, double>{{"queue unavailable", 2}}));
  ASSERT_EQ(n.peers.size(), 2u);
  EXPECT_EQ(n.peers[0].address, "10.0.0.3:7420") << "the busiest first";
  EXPECT_EQ(n.peers[0].received_bytes, 2000);
  EXPECT_EQ(n.peers[1].sent_bytes, 100);
}

TEST(Top, ARestartIsNoNegativeRate) {
  const TopNumbers n = NumbersBetween(LookOf(1, 1, Metrics(10)), LookOf(2, 2, Metrics(1)));
  EXPECT_TRUE(n.restarted);
  EXPECT_EQ(n.sender.kv_bytes, 0);
  EXPECT_TRUE(n.errors.empty());
}

TEST(Top, TwoLooksInOneMoment) { EXPECT_GE(NumbersBetween(LookOf(1, 1, ""), LookOf(1, 1, Metrics(1))).sender.kv_bytes, 0); }

std::vector<std::string> LinesOf(const std::string& frame) {
  std::vector<std::string> lines;
  std::istringstream in(frame);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(Top, AFrameFitsTheTerminal) {
  Look now = LookOf(14, 1, Metrics(10));
  for (int i = 0; i < 50; ++i) {
    v1::TransferReport* transfer = now.transfers.add_transfers();
    transfer->set_transfer_id("t-" + std::to_string(i) + "\x1b[31m");
    now.peers.add_peers()->set_address("10.0.0." + std::to_string(i));
    now.peers.mutable_peers(i)->set_last_error(std::string(300, 'e') + "\n\x1b[2J");
  }
  const TopNumbers numbers = NumbersBetween(LookOf(10, 1, Metrics(2)), now);
  for (const size_t rows : {1, 5, 11, 12, 13, 14, 24, 60, 1000}) {
    for (const size_t columns : {20, 80, 400}) {
      const std::string frame = TopFrame(now, numbers, "12:00:00", rows, columns);
      const std::vector<std::string> lines = LinesOf(frame);
      EXPECT_LE(lines.size(), rows);
      for (const std::string& line : lines) EXPECT_LE(line.size(), columns);
      EXPECT_EQ(frame.find('\x1b'), std::string::npos) << "what others wrote moves no cursor";
    }
  }
  const std::string frame = TopFrame(now, numbers, "12:00:00", 40, 120);
  EXPECT_NE(frame.find("12:00:00  spectrumkvd 1.0.0  ready  avx2"), std::string::npos) << frame;
  EXPECT_NE(frame.find("8.00 MB/s"), std::string::npos) << frame;
  EXPECT_NE(frame.find("RAW 25.0 %  Q4 75.0 %"), std::string::npos) << frame;
  EXPECT_NE(frame.find("queue unavailable 2.00"), std::string::npos) << frame;
  EXPECT_NE(frame.find("more"), std::string::npos) << frame;
  EXPECT_NE(frame.find("PEER"), std::string::npos);
  EXPECT_NE(frame.find("TRANSFER"), std::string::npos);
}

TEST(Top, JsonIsOneLine) {
  Look now = LookOf(14, 1, Metrics(10));
  now.peers.add_peers()->set_address("10.0.0.2:7420");
  const std::string json = TopJson(now, NumbersBetween(LookOf(10, 1, Metrics(2)), now), "12:00:00");
  EXPECT_EQ(std::count(json.begin(), json.end(), '\n'), 1);
  EXPECT_EQ(json.back(), '\n');
  EXPECT_NE(json.find("\"ratio\":4"), std::string::npos) << json;
  EXPECT_NE(json.find("\"address\":\"10.0.0.2:7420\""), std::string::npos) << json;
}

TEST(Top, RatesAsNetworksHaveThem) {
  EXPECT_EQ(DecimalRate(0), "0 B/s");
  EXPECT_EQ(DecimalRate(999), "999 B/s");
  EXPECT_EQ(DecimalRate(1000), "1.00 kB/s");
  EXPECT_EQ(DecimalRate(1.25e9), "1.25 GB/s");
  EXPECT_EQ(DecimalRate(118e6), "118 MB/s");
  EXPECT_EQ(DecimalRate(5e15), "5000 TB/s");
}

}  // namespace
}  // namespace spectrumkv::ctl
