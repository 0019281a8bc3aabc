#include <algorithm>
#include <set>
#include <string>

#include "server/config/config.h"
#include "server/config/keys.h"
#include "server/config/value.h"

namespace spectrumkv {
namespace {

constexpr size_t kColumns = 100;

constexpr char kHead[] =
    "# Configuration of spectrumkvd: every key, with default, unit, limits and reason.\n"
    "#\n"
    "# Stronger to weaker: flags (--set peer.streams=4), environment (SPECTRUMKV_PEER_STREAMS=4), this file, "
    "defaults.\n"
    "# Sizes may be written 2097152 or 2MiB, times 5000, 5s or 500ms. Unknown and duplicate keys are errors.\n"
    "# spectrumkvd --validate checks a file, --print-config shows what is in force, --print-config=defaults is this "
    "text.\n";

// "# words ..." lines that fit the columns.
std::string Comment(const std::string& indent, const std::string& words) {
  std::string out;
  std::string line = indent + "#";
  for (size_t at = 0; at < words.size();) {
    const size_t space = std::min(words.find(' ', at), words.size());
    const std::string word = words.substr(at, space - at);
    if (line.size() + 1 + word.size() > kColumns) {
      out += line + "\n";
      line = indent + "#";
    }
    line += " " + word;
    at = space + 1;
  }
  return out + line + "\n";
}

std::string Facts(const KeySpec& key) {
  const Config defaults;
  std::string facts = "Default: " + FormatValue(key, defaults) + ".";
  if (!key.unit.empty()) facts += " Unit: " + key.unit + ".";
  const std::string limits = LimitsText(key);
  if (!limits.empty()) facts += " Limits: " + limits + ".";
  return facts;
}

}  // namespace

std::string PrintConfig(const Config& config) {
  std::string out = kHead;
  std::set<std::string> opened;
  for (const KeySpec& key : AllKeys()) {
    std::string indent;
    size_t name_at = 0;
    for (size_t dot = key.path.find('.'); dot != std::string::npos; dot = key.path.find('.', name_at)) {
      const std::string section = key.path.substr(0, dot);
      if (opened.insert(section).second) {
        out += (indent.empty() ? "\n" : "") + indent + key.path.substr(name_at, dot - name_at) + ":\n";
      }
      indent += "  ";
      name_at = dot + 1;
    }
    out += Comment(indent, key.reason) + Comment(indent, Facts(key));
    out += indent + key.path.substr(name_at) + ": " + FormatValue(key, config) + "\n";
  }
  return out;
}

std::string ConfigReference() {
  std::string out;
  std::string section;
  const Config defaults;
  for (const KeySpec& key : AllKeys()) {
    const std::string own = key.path.substr(0, key.path.find('.'));
    if (own != section) {
      out += (section.empty() ? "" : "\n") + std::string("## ") + own + "\n\n";
      out += "| Key | Default | Unit | Limits | What and why |\n|---|---|---|---|---|\n";
      section = own;
    }
    out += "| `" + key.path + "` | `" + FormatValue(key, defaults) + "` | " + key.unit + " | " + LimitsText(key) +
           " | " + key.reason + " |\n";
  }
  return out;
}

}  // namespace spectrumkv
