#include "client/ctl/args.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "client/cpp/status.h"

namespace spectrumkv::ctl {
namespace {

constexpr size_t kMaxIds = size_t{1} << 20;

bool ParseNumber(const std::string& text, uint64_t* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end && !text.empty();
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

}  // namespace

absl::Status UsageError(const std::string& message) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, "USAGE", message);
}

absl::StatusOr<Args> Args::Parse(const std::vector<std::string>& words, const std::vector<Flag>& flags) {
  Args args;
  bool flags_ended = false;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (flags_ended || word.size() < 3 || word.compare(0, 2, "--") != 0) {
      if (word == "--" && !flags_ended) {
        flags_ended = true;
      } else {
        args.positional_.push_back(word);
      }
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.name == name; });
    if (flag == flags.end()) return UsageError("unknown flag --" + name);
    if (args.Has(name)) return UsageError("--" + name + " is given twice");
    std::string value;
    if (flag->value.empty()) {
      if (equals != std::string::npos) return UsageError("--" + name + " takes no value");
    } else if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (++i < words.size()) {
      value = words[i];
    } else {
      return UsageError("--" + name + " needs " + flag->value);
    }
    args.values_[name] = value;
  }
  return args;
}

void Args::Refuse(const std::string& message) {
  if (error_.ok()) error_ = UsageError(message);
}

absl::Status Args::Check(size_t positional_max) const {
  if (error_.ok() && positional_.size() > positional_max) {
    return UsageError("unexpected argument \"" + positional_[positional_max] + "\"");
  }
  return error_;
}

std::string Args::Text(const std::string& name, const std::string& otherwise) const {
  const auto value = values_.find(name);
  return value == values_.end() ? otherwise : value->second;
}

std::string Args::Needed(const std::string& name) {
  if (Text(name).empty()) Refuse("--" + name + " is needed");
  return Text(name);
}

uint64_t Args::Number(const std::string& name, uint64_t otherwise, uint64_t low, uint64_t high) {
  if (!Has(name)) return otherwise;
  uint64_t value = 0;
  if (!ParseNumber(Text(name), &value) || value < low || value > high) {
    Refuse("--" + name + " must be a whole number from " + std::to_string(low) + " to " + std::to_string(high) +
           ", not \"" + Text(name) + "\"");
    return otherwise;
  }
  return value;
}

double Args::Real(const std::string& name, double otherwise) {
  if (!Has(name)) return otherwise;
  const std::string text = Text(name);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value)) {
    Refuse("--" + name + " must be a number, not \"" + text + "\"");
    return otherwise;
  }
  return value;
}

int64_t Args::Milliseconds(const std::string& name, int64_t otherwise) {
  constexpr double kMaxSeconds = 86400 * 365;
  const double seconds = Real(name, static_cast<double>(otherwise) / 1000);
  if (seconds < 0 || seconds > kMaxSeconds) {
    Refuse("--" + name + " must be from 0 to " + std::to_string(static_cast<int64_t>(kMaxSeconds)) + " seconds");
    return otherwise;
  }
  return static_cast<int64_t>(seconds * 1000);
}

absl::StatusOr<std::vector<uint64_t>> ParseIds(const std::string& text) {
  std::vector<uint64_t> ids;
  for (const std::string& part : Split(text, ',')) {
    const size_t dash = part.find('-');
    uint64_t first = 0, last = 0;
    const bool good = ParseNumber(part.substr(0, dash), &first) &&
                      (dash == std::string::npos || ParseNumber(part.substr(dash + 1), &last));
    if (dash == std::string::npos) last = first;
    if (!good || last < first) return UsageError("\"" + part + "\" is no number and no range such as 0-15");
    if (last - first >= kMaxIds - ids.size()) return UsageError("more than " + std::to_string(kMaxIds) + " ids");
    // Counted, as an id beyond the last of all would be 0 again.
    for (uint64_t i = 0; i <= last - first; ++i) ids.push_back(first + i);
  }
  return ids;
}

std::vector<uint64_t> Args::Ids(const std::string& name, uint64_t high) {
  absl::StatusOr<std::vector<uint64_t>> ids = ParseIds(Needed(name));
  if (!ids.ok()) {
    Refuse("--" + name + ": " + std::string(ids.status().message()));
    return {};
  }
  for (const uint64_t id : *ids) {
    if (id <= high) continue;
    Refuse("--" + name + " has " + std::to_string(id) + ", above " + std::to_string(high));
    return {};
  }
  return *std::move(ids);
}

std::vector<std::string> Args::List(const std::string& name) const {
  return Text(name).empty() ? std::vector<std::string>() : Split(Text(name), ',');
}

std::string Args::Hex(const std::string& name) {
  const std::string text = Text(name);
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    unsigned value = 0;
    const auto [stop, error] = std::from_chars(text.data() + i, text.data() + i + 2, value, 16);
    if (error != std::errc() || stop != text.data() + i + 2) break;
    bytes.push_back(static_cast<char>(value));
  }
  if (bytes.size() * 2 != text.size()) Refuse("--" + name + " must be hexadecimal, two digits a byte");
  return bytes;
}

v1::DataType Args::DataType(const std::string& name, v1::DataType otherwise) {
  if (!Has(name)) return otherwise;
  const std::string text = Text(name);
  if (text == "float16") return v1::DATA_TYPE_FLOAT16;
  if (text == "bfloat16") return v1::DATA_TYPE_BFLOAT16;
  if (text == "float32") return v1::DATA_TYPE_FLOAT32;
  Refuse("--" + name + " must be float16, bfloat16 or float32, not \"" + text + "\"");
  return otherwise;
}

std::string Args::Positional(size_t i, const std::string& what) {
  if (i < positional_.size()) return positional_[i];
  Refuse(what + " is needed");
  return "";
}

}  // namespace spectrumkv::ctl
