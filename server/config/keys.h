// The table of keys: the one place that says what a key means. Parsing, checks, printing and documentation walk it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "server/config/config.h"

namespace spectrumkv {

enum class KeyKind {
  kSocket,        // absolute path of a Unix socket
  kFile,          // absolute path or ""; never echoed in messages: people paste keys here
  kDirectory,     // absolute path
  kShmPrefix,     // "/" and a name
  kAddress,       // host:port
  kLoopback,      // host:port on this machine only, or ""
  kMode,          // octal permission bits, one of `allowed`
  kBool,          // true, false
  kCount,         // plain number
  kBytes,         // 2097152 or 2MiB
  kMilliseconds,  // 5000 or 5s
  kSeconds,       // 300 or 5m
  kRatio,         // decimal number
  kChoice,        // one of `allowed`
  kChoices,       // a list of distinct ones, not empty
  kIdentities,    // a list of patterns of server/base/identity.h, not empty
  kHosts,         // a list of rules of server/base/host_rule.h
  kUids           // a list of user ids (server/base/caller.h)
};

using FieldRef = std::variant<std::string& (*)(Config&), uint64_t& (*)(Config&), double& (*)(Config&),
                              bool& (*)(Config&), std::vector<std::string>& (*)(Config&)>;

struct KeySpec {
  std::string path;  // "peer.tls.ca_file"
  KeyKind kind;
  FieldRef field;
  std::string unit;  // "" where a unit makes no sense
  double min = 0;    // of numbers, in the key's unit; exact, all limits are below 2^53
  double max = 0;
  std::vector<std::string> allowed;
  std::string reason;  // what it is and why one would change it
};

// Whether the key takes a list.
bool IsList(KeyKind kind);

// In the order of the file: keys of a section stand together.
const std::vector<KeySpec>& AllKeys();
const KeySpec* FindKey(const std::string& path);

// "SPECTRUMKV_PEER_TLS_CA_FILE".
std::string EnvironmentName(const std::string& path);

// "1 to 16", "one of a, b", "" where everything goes.
std::string LimitsText(const KeySpec& key);

}  // namespace spectrumkv
