#include "server/base/host_rule.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "server/base/host_port.h"
#include "server/base/identity.h"

namespace spectrumkv {
namespace {

// An address, and how many of its bits count. IPv4 stands in its place in IPv6, so ::ffff:10.1.2.3 is 10.1.2.3.
struct Network {
  std::array<uint8_t, 16> bytes = {};
  int bits = 128;
};

std::optional<Network> AddressOf(const std::string& host) {
  const std::string text = WithoutBrackets(host);
  Network network;
  if (inet_pton(AF_INET6, text.c_str(), network.bytes.data()) == 1) return network;
  in_addr v4 = {};
  if (inet_pton(AF_INET, text.c_str(), &v4) != 1) return std::nullopt;
  network.bytes[10] = network.bytes[11] = 0xff;
  std::copy_n(reinterpret_cast<const uint8_t*>(&v4.s_addr), 4, network.bytes.begin() + 12);
  return network;
}

// Nothing where `rule` is a name; `wrong` where it is neither.
std::optional<Network> NetworkOf(const std::string& rule, std::string* wrong) {
  const size_t slash = rule.find('/');
  std::optional<Network> network = AddressOf(rule.substr(0, slash));
  if (slash == std::string::npos) return network;
  if (!network.has_value()) {
    *wrong = "has no address before its /";
    return std::nullopt;
  }
  const std::string digits = rule.substr(slash + 1);
  const int most = rule.find(':') == std::string::npos ? 32 : 128;
  int bits = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), bits);
  if (digits.empty() || parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size() || bits < 0 ||
      bits > most) {
    *wrong = "has no prefix length from 0 to " + std::to_string(most) + " after its /";
    return std::nullopt;
  }
  network->bits = 128 - most + bits;
  for (int bit = network->bits; bit < 128; ++bit) {
    if ((network->bytes[static_cast<size_t>(bit / 8)] >> (7 - bit % 8) & 1) == 0) continue;
    *wrong = "has bits set beyond its prefix length";
    return std::nullopt;
  }
  return network;
}

bool Contains(const Network& network, const Network& address) {
  for (int bit = 0; bit < network.bits; ++bit) {
    const auto byte = static_cast<size_t>(bit / 8);
    if (((network.bytes[byte] ^ address.bytes[byte]) >> (7 - bit % 8) & 1) != 0) return false;
  }
  return true;
}

}  // namespace

std::string CheckHostRule(const std::string& rule) {
  std::string wrong;
  if (NetworkOf(rule, &wrong).has_value()) return "";
  if (!wrong.empty()) return wrong;
  if (rule.find_first_not_of("0123456789.") == std::string::npos) return "is neither an address nor a name";
  wrong = CheckIdentityPattern(rule);
  return wrong.empty() && rule.find("://") == std::string::npos ? "" : "is neither a network, an address nor a name";
}

bool AllowsHost(const std::vector<std::string>& rules, const std::string& host) {
  if (rules.empty()) return true;
  const std::optional<Network> address = AddressOf(host);
  return std::any_of(rules.begin(), rules.end(), [&](const std::string& rule) {
    std::string wrong;
    const std::optional<Network> network = NetworkOf(rule, &wrong);
    if (network.has_value()) return address.has_value() && Contains(*network, *address);
    return !address.has_value() && MatchesIdentity({rule}, PeerNames{{host}, {}});
  });
}

}  // namespace spectrumkv
