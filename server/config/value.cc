#include "server/config/value.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "server/base/caller.h"
#include "server/base/host_rule.h"
#include "server/base/identity.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxPathBytes = 4095;
constexpr size_t kMaxSocketPathBytes = sizeof(sockaddr_un{}.sun_path) - 1;

struct Unit {
  const char* suffix;
  uint64_t factor;
};
constexpr Unit kByteUnits[] = {
    {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40}, {"B", 1}};
constexpr Unit kMillisecondUnits[] = {{"ms", 1}, {"s", 1000}, {"m", 60 * 1000}, {"h", 3600 * 1000}};
constexpr Unit kSecondUnits[] = {{"s", 1}, {"m", 60}, {"h", 3600}};

bool HasControlCharacter(const std::string& text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

// Digits and a unit. "" or what is wrong.
template <size_t kUnits>
std::string ParseWhole(const std::string& text, const Unit (&units)[kUnits], const char* example, uint64_t* value) {
  uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  const std::string suffix(parsed.ptr, end);
  if (parsed.ec == std::errc::result_out_of_range) return "is too large";
  if (parsed.ec != std::errc()) return std::string("is not a whole number such as ") + example;
  if (text.size() > 1 && text[0] == '0' && text[1] >= '0' && text[1] <= '9') return "has a leading zero";
  if (suffix.empty()) {
    *value = number;
    return "";
  }
  for (const Unit& unit : units) {
    if (suffix != unit.suffix) continue;
    if (number > std::numeric_limits<uint64_t>::max() / unit.factor) return "is too large";
    *value = number * unit.factor;
    return "";
  }
  return std::string("is not a whole number such as ") + example;
}

std::string ParseNumber(const KeySpec& key, const std::string& text, uint64_t* value) {
  static constexpr Unit kNone[] = {{"", 1}};
  switch (key.kind) {
    case KeyKind::kBytes: return ParseWhole(text, kByteUnits, "2097152 or 2MiB", value);
    case KeyKind::kMilliseconds: return ParseWhole(text, kMillisecondUnits, "5000, 5s or 500ms", value);
    case KeyKind::kSeconds: return ParseWhole(text, kSecondUnits, "300, 300s or 5m", value);
    default: return ParseWhole(text, kNone, "16", value);
  }
}

std::string ParseRatio(const std::string& text, double* value) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || !std::isfinite(number)) {
    return "is not a decimal number such as 0.5";
  }
  *value = number == 0 ? 0 : number;  // no minus zero
  return "";
}

std::string CheckHost(const std::string& host, bool bracketed) {
  in6_addr v6{};
  in_addr v4{};
  if (bracketed) return inet_pton(AF_INET6, host.c_str(), &v6) == 1 ? "" : "has no IPv6 address in its brackets";
  if (host.empty()) return "has no host; 0.0.0.0 stands for every interface";
  if (host.find_first_not_of("0123456789.") == std::string::npos) {
    return inet_pton(AF_INET, host.c_str(), &v4) == 1 ? "" : "has a host that is no IPv4 address";
  }
  static constexpr char kNameCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.";
  if (host.size() > 253 || host.find_first_not_of(kNameCharacters) != std::string::npos) {
    return "has a host that is neither a name nor an address (IPv6 needs brackets: [::]:7420)";
  }
  return "";
}

bool IsLoopback(const std::string& host) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

std::string CheckPath(const std::string& text, size_t max_bytes) {
  if (text.empty() || text[0] != '/') return "is not an absolute path";
  if (HasControlCharacter(text)) return "has a control character";
  if (text.size() > max_bytes) return "is longer than " + std::to_string(max_bytes) + " bytes";
  return "";
}

std::string CheckText(const KeySpec& key, const std::string& text) {
  std::string host;
  uint16_t port = 0;
  switch (key.kind) {
    case KeyKind::kSocket: return CheckPath(text, kMaxSocketPathBytes);
    case KeyKind::kDirectory: return CheckPath(text, kMaxPathBytes);
    case KeyKind::kFile: return text.empty() ? "" : CheckPath(text, kMaxPathBytes);
    case KeyKind::kShmPrefix: {
      static constexpr char kNameCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
      if (text.empty() || text[0] != '/' || text.find_first_not_of(kNameCharacters, 1) != std::string::npos) {
        return "is not \"/\" followed by letters, digits, dots, underscores or dashes";
      }
      return text.size() > 200 ? "is longer than 200 bytes" : "";
    }
    case KeyKind::kAddress: return ParseAddress(text, &host, &port);
    case KeyKind::kLoopback: {
      if (text.empty()) return "";
      const std::string wrong = ParseAddress(text, &host, &port);
      if (!wrong.empty()) return wrong;
      return IsLoopback(host) ? "" : "is not a loopback address (127.0.0.1, [::1], localhost)";
    }
    default:
      for (const std::string& choice : key.allowed) {
        if (text == choice) return "";
      }
      return "is not " + LimitsText(key);
  }
}

// "" or what is wrong with one item of a list.
std::string CheckItem(const KeySpec& key, const std::string& item) {
  std::string wrong;
  switch (key.kind) {
    case KeyKind::kIdentities: wrong = CheckIdentityPattern(item); break;
    case KeyKind::kHosts: wrong = CheckHostRule(item); break;
    case KeyKind::kUids: wrong = CheckUid(item); break;
    default:
      if (std::find(key.allowed.begin(), key.allowed.end(), item) == key.allowed.end()) {
        wrong = "is none of them: " + LimitsText(key);
      }
  }
  return wrong;
}

std::string CheckItems(const KeySpec& key, const std::vector<std::string>& items) {
  constexpr size_t kMaxItems = 256;
  const bool may_be_empty = key.kind == KeyKind::kHosts || key.kind == KeyKind::kUids;
  if (items.empty() && !may_be_empty) return "is an empty list";
  if (items.size() > kMaxItems) return "has more than " + std::to_string(kMaxItems) + " items";
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string wrong = CheckItem(key, items[i]);
    if (!wrong.empty()) return "has " + QuoteForMessage(items[i]) + ", which " + wrong;
    if (std::find(items.begin(), items.begin() + static_cast<ptrdiff_t>(i), items[i]) !=
        items.begin() + static_cast<ptrdiff_t>(i)) {
      return "has " + items[i] + " twice";
    }
  }
  return "";
}

std::string Outside(const KeySpec& key, double value) {
  return value < key.min || value > key.max ? "is outside " + LimitsText(key) : "";
}

std::string SetScalar(const KeySpec& key, const std::string& text, Config* config) {
  std::string wrong;
  if (const auto* text_field = std::get_if<std::string& (*)(Config&)>(&key.field)) {
    wrong = CheckText(key, text);
    if (wrong.empty()) (*text_field)(*config) = text;
  } else if (const auto* bool_field = std::get_if<bool& (*)(Config&)>(&key.field)) {
    if (text != "true" && text != "false") return "is neither true nor false";
    (*bool_field)(*config) = text == "true";
  } else if (const auto* ratio_field = std::get_if<double& (*)(Config&)>(&key.field)) {
    double value = 0;
    wrong = ParseRatio(text, &value);
    if (wrong.empty()) wrong = Outside(key, value);
    if (wrong.empty()) (*ratio_field)(*config) = value;
  } else if (const auto* number_field = std::get_if<uint64_t& (*)(Config&)>(&key.field)) {
    uint64_t value = 0;
    if (key.kind == KeyKind::kMode) {
      wrong = CheckText(key, text);  // one of the allowed, all octal
      std::from_chars(text.data(), text.data() + text.size(), value, 8);
    } else {
      wrong = ParseNumber(key, text, &value);
      if (wrong.empty()) wrong = Outside(key, static_cast<double>(value));
    }
    if (wrong.empty()) (*number_field)(*config) = value;
  }
  return wrong;
}

std::string Trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Plain YAML scalars that no reader takes for something else; all the rest is quoted.
std::string QuoteForYaml(const std::string& text) {
  static constexpr char kSafe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:-";
  const bool letter_first = !text.empty() && (std::isalpha(static_cast<unsigned char>(text[0])) || text[0] == '/');
  const bool address = text.find('.') != std::string::npos && text.find(':') != std::string::npos;
  const bool safe = (letter_first || address) && text.find_first_not_of(kSafe) == std::string::npos &&
                    text.back() != ':' && text != "true" && text != "false" && text != "null";
  if (safe) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    quoted.push_back(c);
  }
  return quoted + "\"";
}

std::string ExampleItem(const KeySpec& key) {
  if (!key.allowed.empty()) return key.allowed[0];
  return key.kind == KeyKind::kUids ? "1000" : "kv.example";
}

}  // namespace

std::string SetValue(const KeySpec& key, const RawValue& value, Config* config) {
  const bool wants_list = IsList(key.kind);
  if (wants_list && !value.is_list) {
    return key.path + " is not a list such as [" + ExampleItem(key) + "]";
  }
  if (!wants_list && value.is_list) return key.path + " is a list, but takes one value";
  if (wants_list) {
    const std::string wrong = CheckItems(key, value.items);
    if (!wrong.empty()) return key.path + " " + wrong;
    std::get<std::vector<std::string>& (*)(Config&)>(key.field)(*config) = value.items;
    return "";
  }
  const std::string wrong = SetScalar(key, value.items.at(0), config);
  if (wrong.empty()) return "";
  return key.path + " " + (key.kind == KeyKind::kFile ? "" : QuoteForMessage(value.items[0]) + " ") + wrong;
}

RawValue SplitForKey(const KeySpec& key, const std::string& text) {
  if (!IsList(key.kind)) return {false, {text}};
  std::string inner = Trim(text);
  if (inner.size() >= 2 && inner.front() == '[' && inner.back() == ']') inner = Trim(inner.substr(1, inner.size() - 2));
  RawValue value{true, {}};
  if (inner.empty()) return value;
  for (size_t at = 0;;) {
    const size_t comma = inner.find(',', at);
    value.items.push_back(Trim(inner.substr(at, comma == std::string::npos ? comma : comma - at)));
    if (comma == std::string::npos) return value;
    at = comma + 1;
  }
}

std::string FormatValue(const KeySpec& key, const Config& config) {
  Config& mutable_config = const_cast<Config&>(config);  // the accessors serve writers too; nothing is written here
  if (const auto* text = std::get_if<std::string& (*)(Config&)>(&key.field)) {
    return QuoteForYaml((*text)(mutable_config));
  }
  if (const auto* flag = std::get_if<bool& (*)(Config&)>(&key.field)) return (*flag)(mutable_config) ? "true" : "false";
  if (const auto* ratio = std::get_if<double& (*)(Config&)>(&key.field)) return NumberText((*ratio)(mutable_config));
  if (const auto* list = std::get_if<std::vector<std::string>& (*)(Config&)>(&key.field)) {
    std::string out;
    for (const std::string& item : (*list)(mutable_config)) out += (out.empty() ? "" : ", ") + QuoteForYaml(item);
    return "[" + out + "]";
  }
  const uint64_t number = std::get<uint64_t& (*)(Config&)>(key.field)(mutable_config);
  if (key.kind == KeyKind::kBytes) return BytesText(number);
  if (key.kind != KeyKind::kMode) return std::to_string(number);
  char octal[24];
  const auto end = std::to_chars(octal, octal + sizeof(octal), number, 8).ptr;
  return "\"0" + std::string(octal, end) + "\"";
}

std::string ParseAddress(const std::string& text, std::string* host, uint16_t* port) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return "is not host:port";
  const std::string digits = text.substr(colon + 1);
  unsigned number = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (digits.empty() || parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size() || number > 65535) {
    return "has no port from 0 to 65535 after its last colon";
  }
  std::string name = text.substr(0, colon);
  const bool bracketed = name.size() >= 2 && name.front() == '[' && name.back() == ']';
  if (bracketed) name = name.substr(1, name.size() - 2);
  const std::string wrong = CheckHost(name, bracketed);
  if (!wrong.empty()) return wrong;
  *host = name;
  *port = static_cast<uint16_t>(number);
  return "";
}

std::string BytesText(uint64_t bytes) {
  if (bytes == 0) return "0";
  std::string text = std::to_string(bytes);
  for (const Unit& unit : kByteUnits) {
    if (unit.factor > 1 && bytes % unit.factor == 0) text = std::to_string(bytes / unit.factor) + unit.suffix;
  }
  return text;
}

std::string NumberText(double value) {
  char text[400];
  return std::string(text, std::to_chars(text, text + sizeof(text), value, std::chars_format::fixed).ptr);
}

std::string QuoteForMessage(const std::string& text) {
  constexpr size_t kShown = 80;
  std::string quoted = "\"";
  for (size_t i = 0; i < std::min(text.size(), kShown); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c < 0x20 || c == 0x7f) {
      quoted += "?";
    } else {
      quoted.push_back(static_cast<char>(c));
    }
  }
  return quoted + (text.size() > kShown ? "...\"" : "\"");
}

}  // namespace spectrumkv
