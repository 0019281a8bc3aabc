// What the table of keys says, in words.
#include <cctype>

#include "server/config/keys.h"
#include "server/config/value.h"

namespace spectrumkv {

const KeySpec* FindKey(const std::string& path) {
  for (const KeySpec& key : AllKeys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

std::string EnvironmentName(const std::string& path) {
  std::string name = "SPECTRUMKV_";
  for (const char c : path) {
    name.push_back(c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c))));
  }
  return name;
}

bool IsList(KeyKind kind) {
  return kind == KeyKind::kChoices || kind == KeyKind::kIdentities || kind == KeyKind::kHosts ||
         kind == KeyKind::kUids;
}

std::string LimitsText(const KeySpec& key) {
  if (!key.allowed.empty()) {
    std::string text = key.kind == KeyKind::kChoices ? "some of " : "one of ";
    for (size_t i = 0; i < key.allowed.size(); ++i) text += (i > 0 ? ", " : "") + key.allowed[i];
    return text;
  }
  switch (key.kind) {
    case KeyKind::kBool: return "true or false";
    case KeyKind::kCount:
    case KeyKind::kMilliseconds:
    case KeyKind::kSeconds:
    case KeyKind::kRatio: return NumberText(key.min) + " to " + NumberText(key.max);
    case KeyKind::kBytes:
      return BytesText(static_cast<uint64_t>(key.min)) + " to " + BytesText(static_cast<uint64_t>(key.max));
    default: return "";
  }
}

}  // namespace spectrumkv
