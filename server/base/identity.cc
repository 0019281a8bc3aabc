#include "server/base/identity.h"

#include <algorithm>
#include <cctype>

namespace spectrumkv {
namespace {

constexpr size_t kMaxPatternBytes = 253;
constexpr size_t kMaxTextBytes = 200;

bool IsUri(const std::string& pattern) { return pattern.find("://") != std::string::npos; }

std::vector<std::string> Parts(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

bool SamePart(const std::string& pattern, const std::string& name, bool any_case) {
  if (pattern == "*") return !name.empty() && name.find('*') == std::string::npos;
  const auto same = [any_case](char a, char b) {
    return any_case ? std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b))
                    : a == b;
  };
  return std::equal(pattern.begin(), pattern.end(), name.begin(), name.end(), same);
}

bool Fits(const std::string& pattern, const std::string& name, bool uri) {
  const char separator = uri ? '/' : '.';
  const std::vector<std::string> wanted = Parts(pattern, separator), given = Parts(name, separator);
  return std::equal(wanted.begin(), wanted.end(), given.begin(), given.end(),
                    [uri](const std::string& a, const std::string& b) { return SamePart(a, b, !uri); });
}

}  // namespace

std::string CheckIdentityPattern(const std::string& pattern) {
  if (pattern.empty()) return "is empty";
  if (pattern.size() > kMaxPatternBytes) return "is longer than " + std::to_string(kMaxPatternBytes) + " bytes";
  const bool uri = IsUri(pattern);
  for (const char c : pattern) {
    const bool letter =
        std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' || c == '.' || c == '*';
    const bool in_uri =
        std::isgraph(static_cast<unsigned char>(c)) != 0 && c != ',' && c != '[' && c != ']' && c != '"';
    if (uri ? !in_uri : !letter) return "is neither a DNS name nor a URI with ://";
  }
  for (const std::string& part : Parts(pattern, uri ? '/' : '.')) {
    if (part.empty() && !uri) return "has an empty label";
    if (part.find('*') != std::string::npos && part != "*") return "has a * that is a part of a label or segment";
  }
  return "";
}

bool MatchesIdentity(const std::vector<std::string>& patterns, const PeerNames& names) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    const bool uri = IsUri(pattern);
    const std::vector<std::string>& given = uri ? names.uris : names.dns;
    return std::any_of(given.begin(), given.end(), [&](const std::string& name) { return Fits(pattern, name, uri); });
  });
}

std::string NamesText(const PeerNames& names) {
  std::string text;
  for (const auto* list : {&names.dns, &names.uris}) {
    for (const std::string& name : *list) {
      if (text.size() < kMaxTextBytes) text += (text.empty() ? "" : ", ") + name.substr(0, kMaxTextBytes);
    }
  }
  return text.empty() ? "nobody" : text;
}

}  // namespace spectrumkv
