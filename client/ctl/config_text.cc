#include "client/ctl/config_text.h"

#include <algorithm>
#include <charconv>
#include <sstream>

namespace spectrumkv::ctl {
namespace {

constexpr size_t kIndent = 2;

std::string Unquoted(const std::string& text) {
  return text.size() >= 2 && text.front() == '"' && text.back() == '"' ? text.substr(1, text.size() - 2) : text;
}

std::string Trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') - first + 1);
}

}  // namespace

std::optional<std::string> ConfigText::Value(const std::string& key) const {
  std::istringstream lines(text_);
  std::vector<std::string> path;
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find_first_not_of(' ');
    if (first == std::string::npos || line[first] == '#') continue;
    const size_t colon = line.find(':', first);
    if (colon == std::string::npos) continue;
    path.resize(std::min(path.size(), first / kIndent));
    std::string name;
    for (const std::string& part : path) name += part + ".";
    path.push_back(line.substr(first, colon - first));
    if (name + path.back() == key) return Unquoted(Trimmed(line.substr(colon + 1)));
  }
  return std::nullopt;
}

std::optional<uint64_t> ConfigText::Number(const std::string& key) const {
  const std::optional<std::string> text = Value(key);
  if (!text) return std::nullopt;
  uint64_t number = 0;
  const char* const end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, number);
  if (error != std::errc()) return std::nullopt;
  int shift = 0;
  for (const char* const unit : {"", "KiB", "MiB", "GiB", "TiB"}) {
    if (std::string(stop, end) == unit) return number << shift;
    shift += 10;
  }
  return std::nullopt;
}

std::vector<std::string> ConfigText::List(const std::string& key) const {
  std::vector<std::string> all;
  const std::string text = Value(key).value_or("");
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') return all;
  std::istringstream parts(text.substr(1, text.size() - 2));
  for (std::string part; std::getline(parts, part, ',');) {
    if (!Trimmed(part).empty()) all.push_back(Unquoted(Trimmed(part)));
  }
  return all;
}

}  // namespace spectrumkv::ctl
