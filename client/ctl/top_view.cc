#include "client/ctl/top_view.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

// In the order in which people think of them.
const char* const kTierOrder[] = {"RAW", "P8", "Q8", "P4", "Q4", "Q3", "Q2"};
const char* const kOutcomes[] = {"committed", "failed", "expired", "cancelled"};

std::map<std::string, double> RatesBy(const Look& before, const Look& now, double seconds, const std::string& name,
                                      const std::vector<std::string>& by, const Exposition::Labels& labels = {}) {
  std::map<std::string, double> rates = now.metrics.SumBy(name, by, labels);
  for (const auto& [key, value] : before.metrics.SumBy(name, by, labels)) rates[key] -= value;
  for (auto& [key, value] : rates) value = std::max(0.0, value) / seconds;
  return rates;
}

TopNumbers::Role RoleBetween(const Look& before, const Look& now, double seconds, const std::string& role) {
  const Exposition::Labels labels = {{"role", role}};
  const auto rate = [&](const char* name) { return RatesBy(before, now, seconds, name, {}, labels)[""]; };
  TopNumbers::Role out;
  out.kv_bytes = rate("spectrumkv_kv_bytes_total");
  out.wire_bytes = rate("spectrumkv_wire_bytes_total");
  if (out.wire_bytes > 0) out.ratio = out.kv_bytes / out.wire_bytes;
  out.outcomes = RatesBy(before, now, seconds, "spectrumkv_transfers_total", {"outcome"}, labels);
  const auto tokens = RatesBy(before, now, seconds, "spectrumkv_tokens_total", {"tier"}, labels);
  double all = 0;
  for (const auto& [tier, count] : tokens) all += count;
  for (const auto& [tier, count] : tokens) {
    if (count > 0) out.tier_share[tier] = count / all;
  }
  return out;
}

std::vector<TopNumbers::Peer> PeersBetween(const Look& before, const Look& now, double seconds) {
  const auto key = [](const v1::PeerInfo& peer) { return peer.address() + ' ' + peer.direction(); };
  std::map<std::string, const v1::PeerInfo*> known;
  for (const v1::PeerInfo& peer : before.peers.peers()) known[key(peer)] = &peer;
  std::vector<TopNumbers::Peer> out;
  for (const v1::PeerInfo& peer : now.peers.peers()) {
    const auto old = known.find(key(peer));
    const auto rate = [&](uint64_t value, uint64_t earlier) {
      return old == known.end() || value < earlier ? static_cast<double>(value) / seconds
                                                   : static_cast<double>(value - earlier) / seconds;
    };
    TopNumbers::Peer one;
    one.address = peer.address();
    one.direction = peer.direction();
    one.last_error = peer.last_error();
    one.sessions_active = peer.sessions_active();
    one.sent_bytes = rate(peer.wire_bytes_sent(), old == known.end() ? 0 : old->second->wire_bytes_sent());
    one.received_bytes = rate(peer.wire_bytes_received(), old == known.end() ? 0 : old->second->wire_bytes_received());
    if (peer.has_link_bytes_per_second()) one.link_bytes = peer.link_bytes_per_second();
    out.push_back(std::move(one));
  }
  std::stable_sort(out.begin(), out.end(), [](const TopNumbers::Peer& a, const TopNumbers::Peer& b) {
    return a.sent_bytes + a.received_bytes > b.sent_bytes + b.received_bytes;
  });
  return out;
}

std::string Digits(double value) { return Real(value, value >= 100 || value == 0 ? 0 : value >= 10 ? 1 : 2); }

// What others wrote may hold anything; a terminal shall not obey it.
std::string Visible(std::string text) {
  for (char& c : text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = ' ';
  }
  return text;
}

std::string Join(const std::vector<std::string>& parts, const std::string& nothing) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : "  ") + part;
  return text.empty() ? nothing : text;
}

std::string TierWords(const TopNumbers::Role& role) {
  std::vector<std::string> words;
  for (const char* tier : kTierOrder) {
    const auto share = role.tier_share.find(tier);
    if (share != role.tier_share.end()) words.push_back(std::string(tier) + " " + Percent(share->second));
  }
  return Join(words, "-");
}

std::string OutcomeWords(const TopNumbers::Role& role) {
  std::vector<std::string> words;
  for (const char* outcome : kOutcomes) {
    const auto rate = role.outcomes.find(outcome);
    const double value = rate == role.outcomes.end() ? 0 : rate->second;
    if (value > 0 || outcome == kOutcomes[0]) words.push_back(Digits(value) + " " + outcome);
  }
  return Join(words, "-");
}

std::string Summary(const TopNumbers& numbers) {
  const auto ratio = [](const TopNumbers::Role& role) { return role.ratio ? Real(*role.ratio, 2) : "-"; };
  const TopNumbers::Role &out = numbers.sender, &in = numbers.receiver;
  return Table({{"", "SENDING", "RECEIVING"},
                {"raw KV", DecimalRate(out.kv_bytes), DecimalRate(in.kv_bytes)},
                {"wire", DecimalRate(out.wire_bytes), DecimalRate(in.wire_bytes)},
                {"raw : wire", ratio(out), ratio(in)},
                {"ended /s", OutcomeWords(out), OutcomeWords(in)},
                {"tiers", TierWords(out), TierWords(in)}});
}

std::string Head(const Look& now, const TopNumbers& numbers, const std::string& clock) {
  const v1::GetStatusResponse& status = now.status;
  const char* const state = status.draining() ? "draining" : status.ready() ? "ready" : "not ready";
  std::string slots;
  for (const v1::SlotUsage& usage : status.slots()) {
    slots += (slots.empty() ? "" : ", ") + usage.partition() + " " + std::to_string(usage.slots_used()) + "/" +
             std::to_string(usage.slots_total());
  }
  std::string errors;
  for (const auto& [what, rate] : numbers.errors) errors += (errors.empty() ? "" : ", ") + what + " " + Digits(rate);
  return clock + "  spectrumkvd " + status.version() + "  " + state + "  " + status.backend() + "  up " +
         Seconds(status.uptime_seconds()) + (numbers.restarted ? "  RESTARTED" : "") + "\n" +
         std::to_string(status.inflight_transfers()) + " transfers under way, " + std::to_string(status.pools()) +
         " pools, staging: " + slots + "; saved so far " + Bytes(static_cast<uint64_t>(numbers.saved_bytes_ever)) +
         "\nerrors /s: " + (errors.empty() ? "none" : errors) + "\n";
}

std::string PeerTable(const TopNumbers& numbers) {
  std::vector<std::vector<std::string>> rows = {{"PEER", "DIRECTION", "ACTIVE", "SENT", "RECEIVED", "LINK", "LAST ERROR"}};
  for (const TopNumbers::Peer& peer : numbers.peers) {
    rows.push_back({Visible(peer.address), peer.direction, std::to_string(peer.sessions_active), DecimalRate(peer.sent_bytes),
                    DecimalRate(peer.received_bytes), peer.link_bytes ? DecimalRate(*peer.link_bytes) : "-",
                    Visible(peer.last_error)});
  }
  return Table(rows);
}

std::string TransferTable(const Look& now) {
  std::vector<std::vector<std::string>> rows = {{"TRANSFER", "ROLE", "STATE", "TOKENS", "KV", "WIRE", "TIME"}};
  for (const v1::TransferReport& r : now.transfers.transfers()) {
    rows.push_back({Visible(r.transfer_id()), RoleName(r.role()), StateName(r.state()), std::to_string(r.tokens()),
                    Bytes(r.kv_bytes()), Bytes(r.wire_bytes()), Seconds(r.duration_seconds())});
  }
  return Table(rows);
}

// The first `rows` lines of a table with a head, or nothing where it has no more than that head; the rest is counted.
std::vector<std::string> FirstLines(const std::string& table, size_t rows) {
  std::vector<std::string> lines;
  std::istringstream in(table);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  if (lines.size() < 2 || rows < 2) return {};
  if (lines.size() > rows) {
    const size_t left = lines.size() - rows + 1;
    lines.resize(rows - 1);
    lines.push_back("and " + std::to_string(left) + " more");
  }
  return lines;
}

}  // namespace

std::string DecimalRate(double bytes_per_second) {
  static const char* const kUnits[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  size_t unit = 0;
  for (; bytes_per_second >= 1000 && unit + 1 < std::size(kUnits); ++unit) bytes_per_second /= 1000;
  return (unit == 0 ? Real(bytes_per_second, 0) : Digits(bytes_per_second)) + " " + kUnits[unit];
}

TopNumbers NumbersBetween(const Look& before, const Look& now) {
  TopNumbers numbers;
  numbers.restarted = before.status.epoch() != now.status.epoch();
  numbers.seconds = now.at_seconds - before.at_seconds;
  const double seconds = std::max(numbers.seconds, 1e-3);
  const Look& from = numbers.restarted ? now : before;
  numbers.sender = RoleBetween(from, now, seconds, "sender");
  numbers.receiver = RoleBetween(from, now, seconds, "receiver");
  numbers.peers = PeersBetween(from, now, seconds);
  numbers.saved_bytes_ever = now.metrics.Sum("spectrumkv_saved_bytes_total", {{"role", "receiver"}}) +
                             now.metrics.Sum("spectrumkv_saved_bytes_total", {{"role", "sender"}});
  const auto errors = [&](const char* name, const std::vector<std::string>& by, const std::string& prefix) {
    for (const auto& [what, rate] : RatesBy(from, now, seconds, name, by)) {
      if (rate > 0) numbers.errors[prefix + what] = rate;
    }
  };
  errors("spectrumkv_errors_total", {"stage", "code"}, "");
  errors("spectrumkv_handshake_failures_total", {}, "TLS handshakes");
  errors("spectrumkv_quota_refusals_total", {"quota"}, "quota ");
  errors("spectrumkv_worker_connections_refused_total", {"cause"}, "connections refused ");
  errors("spectrumkv_leases_expired_total", {"kind"}, "leases expired ");
  return numbers;
}

std::string TopFrame(const Look& now, const TopNumbers& numbers, const std::string& clock, size_t rows, size_t columns) {
  std::vector<std::string> lines;
  std::istringstream top(Head(now, numbers, clock) + "\n" + Summary(numbers));
  for (std::string line; std::getline(top, line);) lines.push_back(line);
  // Half of what is left for peers, the rest for transfers.
  const size_t left = rows > lines.size() + 2 ? rows - lines.size() - 2 : 0;
  const std::vector<std::string> transfers = FirstLines(TransferTable(now), left);
  const std::vector<std::string> peers = FirstLines(PeerTable(numbers), left - std::min(transfers.size(), left / 2));
  for (const auto& table : {peers, FirstLines(TransferTable(now), left - peers.size())}) {
    if (table.empty()) continue;
    lines.emplace_back();
    lines.insert(lines.end(), table.begin(), table.end());
  }
  if (lines.size() > rows) lines.resize(rows);
  std::string frame;
  for (const std::string& line : lines) frame += line.substr(0, columns) + "\n";
  return frame;
}

}  // namespace spectrumkv::ctl
