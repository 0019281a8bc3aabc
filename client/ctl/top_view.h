// What `top` shows: two looks at a daemon, the numbers between them, and their picture. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/ctl/exposition.h"
#include "spectrumkv/v1/admin_service.pb.h"

namespace spectrumkv::ctl {

struct Look {
  double at_seconds = 0;  // monotonic
  v1::GetStatusResponse status;
  v1::ListPeersResponse peers;
  v1::ListTransfersResponse transfers;  // active ones
  Exposition metrics;
};

// Rates are for each second between the looks, bytes raw unless named wire.
struct TopNumbers {
  struct Role {
    double kv_bytes = 0, wire_bytes = 0;
    std::optional<double> ratio;               // raw for each byte on the wire, where any went
    std::map<std::string, double> outcomes;    // transfers that ended
    std::map<std::string, double> tier_share;  // of what went, without those at 0
  };
  struct Peer {
    std::string address, direction, last_error;
    uint64_t sessions_active = 0;
    double sent_bytes = 0, received_bytes = 0;  // wire, of transfers that ended
    std::optional<double> link_bytes;
  };
  double seconds = 0;
  bool restarted = false;  // between the looks: rates are 0
  Role sender, receiver;
  std::map<std::string, double> errors;  // "stage code", refusals too, without those at 0
  std::vector<Peer> peers;               // the busiest first
  double saved_bytes_ever = 0;
};

TopNumbers NumbersBetween(const Look& before, const Look& now);

// A frame of at most `rows` lines of at most `columns` characters; `clock` is the time of day.
std::string TopFrame(const Look& now, const TopNumbers& numbers, const std::string& clock, size_t rows, size_t columns);
// The same as one line of JSON.
std::string TopJson(const Look& now, const TopNumbers& numbers, const std::string& clock);

// "1.25 GB/s": decimal, as networks are.
std::string DecimalRate(double bytes_per_second);

}  // namespace spectrumkv::ctl
