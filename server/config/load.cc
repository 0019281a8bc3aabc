#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "server/base/status.h"
#include "server/config/checks.h"
#include "server/config/config.h"
#include "server/config/keys.h"
#include "server/config/text_file.h"
#include "server/config/value.h"
#include "server/config/yaml_reader.h"

namespace spectrumkv {
namespace {

constexpr const char* kWhat = "configuration file";
constexpr size_t kMaxErrors = 100;

// Edit distance, as far as it matters for a suggestion.
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// The nearest of `names` if it is near, else "".
std::string Nearest(const std::string& text, const std::vector<std::string>& names, size_t within) {
  if (text.size() > 100) return "";
  std::string best;
  size_t best_distance = within + 1;
  for (const std::string& name : names) {
    const size_t apart = text.size() > name.size() ? text.size() - name.size() : name.size() - text.size();
    if (apart >= best_distance) continue;  // the distance is no less
    const size_t distance = Distance(text, name);
    if (distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

// Every key, and every section that holds keys.
std::vector<std::string> PathsAndSections() {
  std::set<std::string> names;
  for (const KeySpec& key : AllKeys()) {
    names.insert(key.path);
    for (size_t dot = key.path.find('.'); dot != std::string::npos; dot = key.path.find('.', dot + 1)) {
      names.insert(key.path.substr(0, dot));
    }
  }
  return {names.begin(), names.end()};
}

bool IsSection(const std::string& path) {
  for (const KeySpec& key : AllKeys()) {
    if (key.path.compare(0, path.size() + 1, path + ".") == 0) return true;
  }
  return false;
}

std::string UnknownKey(const std::string& path) {
  std::string message = "unknown key " + QuoteForMessage(path);
  const std::string nearest = Nearest(path, PathsAndSections(), std::min<size_t>(3, path.size() / 3));
  if (!nearest.empty()) message += "; did you mean " + nearest + "?";
  return message;
}

// Merges the sources, weakest first, and gathers what is wrong with them.
class Loader {
 public:
  void ApplyYaml(const std::string& name, const std::string& text) {
    YamlNode root;
    YamlError error;
    if (!ReadYaml(text, &root, &error)) {
      AddError(name + ":" + std::to_string(error.line) + ":" + std::to_string(error.column), error.message);
      return;
    }
    if (root.kind == YamlNode::Kind::kNull) return;
    if (root.kind != YamlNode::Kind::kMap) {
      AddError(Place(name, root), "the file is not a map of sections");
      return;
    }
    ApplyMap(name, "", root);
  }

  void ApplyEnvironment(const std::map<std::string, std::string>& env) {
    std::map<std::string, const KeySpec*> key_of;
    std::vector<std::string> names;
    for (const KeySpec& key : AllKeys()) {
      names.push_back(EnvironmentName(key.path));
      key_of[names.back()] = &key;
    }
    for (const auto& [name, value] : env) {
      if (name.compare(0, 11, "SPECTRUMKV_") != 0) continue;
      const auto found = key_of.find(name);
      if (found != key_of.end()) {
        Apply("environment " + name, *found->second, SplitForKey(*found->second, value));
        continue;
      }
      const std::string nearest = Nearest(name, names, 2);
      if (IsServiceLink(name) || (nearest.empty() && !StartsWithSection(name))) continue;
      AddError("environment " + QuoteForMessage(name),
               "names no key" + (nearest.empty() ? "" : "; did you mean " + nearest + "?"));
    }
  }

  void ApplySets(const std::vector<std::string>& sets) {
    for (const std::string& set : sets) {
      const size_t equals = set.find('=');
      if (equals == std::string::npos) {
        AddError("--set", "needs KEY=VALUE, for example --set peer.streams=4");
        continue;
      }
      const std::string path = set.substr(0, equals);
      const KeySpec* key = FindKey(path);
      if (key == nullptr) {
        AddError("--set", IsSection(path) ? path + " is a section, not a key" : UnknownKey(path));
      } else {
        Apply("--set", *key, SplitForKey(*key, set.substr(equals + 1)));
      }
    }
  }

  absl::StatusOr<Config> Finish() {
    for (const CheckFailure& failure : CheckTogether(config_)) {
      // What was refused already would only be reported twice, against a value that nobody chose.
      const bool sound = std::none_of(failure.keys.begin(), failure.keys.end(),
                                      [this](const std::string& key) { return refused_.count(key) > 0; });
      if (!sound) continue;
      const auto place = places_.find(failure.keys[0]);
      AddError(place != places_.end() ? place->second : "default", failure.message);
    }
    if (errors_.empty()) return config_;
    std::string joined;
    for (size_t i = 0; i < std::min(errors_.size(), kMaxErrors); ++i) joined += (i > 0 ? "\n" : "") + errors_[i];
    if (errors_.size() > kMaxErrors) joined += "\nand " + std::to_string(errors_.size() - kMaxErrors) + " more";
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_CONFIG", joined,
                     {{"errors", std::to_string(errors_.size())}});
  }

 private:
  static std::string Place(const std::string& name, const YamlNode& node) {
    return name + ":" + std::to_string(node.line) + ":" + std::to_string(node.column);
  }

  void AddError(const std::string& place, const std::string& message) { errors_.push_back(place + ": " + message); }

  void Apply(const std::string& place, const KeySpec& key, const RawValue& value) {
    const std::string wrong = SetValue(key, value, &config_);
    if (wrong.empty()) {
      places_[key.path] = place;
    } else {
      refused_.insert(key.path);
      AddError(place, wrong);
    }
  }

  void ApplyMap(const std::string& name, const std::string& prefix, const YamlNode& map) {
    std::map<std::string, int> line_of;
    for (size_t i = 0; i + 1 < map.children.size(); i += 2) {
      const YamlNode& key = map.children[i];
      if (key.kind != YamlNode::Kind::kScalar) {
        AddError(Place(name, key), "a key must be a plain word");
        continue;
      }
      if (key.scalar.find('.') != std::string::npos && FindKey(prefix + key.scalar) != nullptr) {
        AddError(Place(name, key), prefix + key.scalar + " is written with dots; nest it in sections");
        continue;
      }
      const auto [first, is_new] = line_of.emplace(key.scalar, key.line);
      if (!is_new) {
        AddError(Place(name, key), "duplicate key " + QuoteForMessage(prefix + key.scalar) + ", first on line " +
                                       std::to_string(first->second));
        continue;
      }
      ApplyEntry(name, prefix + key.scalar, key, map.children[i + 1]);
    }
  }

  void ApplyEntry(const std::string& name, const std::string& path, const YamlNode& key, const YamlNode& value) {
    const KeySpec* spec = FindKey(path);
    if (spec == nullptr) {
      if (!IsSection(path)) {
        AddError(Place(name, key), UnknownKey(path));
      } else if (value.kind == YamlNode::Kind::kMap) {
        ApplyMap(name, path + ".", value);
      } else if (value.kind != YamlNode::Kind::kNull) {  // a section whose keys are all commented out is fine
        AddError(Place(name, value), path + " is a section; its keys stand below it, indented");
      }
      return;
    }
    RawValue raw;
    if (!ToRaw(value, &raw)) {
      refused_.insert(path);
      AddError(Place(name, value.kind == YamlNode::Kind::kNull ? key : value),
               path + (value.kind == YamlNode::Kind::kNull ? " has no value; leave it out, or write \"\" for empty"
                                                           : " takes a value, not a section or a nested list"));
      return;
    }
    Apply(Place(name, value), *spec, raw);
  }

  static bool ToRaw(const YamlNode& node, RawValue* raw) {
    if (node.kind == YamlNode::Kind::kScalar) {
      *raw = {false, {node.scalar}};
      return true;
    }
    if (node.kind != YamlNode::Kind::kList) return false;
    *raw = {true, {}};
    for (const YamlNode& item : node.children) {
      if (item.kind != YamlNode::Kind::kScalar) return false;
      raw->items.push_back(item.scalar);
    }
    return true;
  }

  static bool StartsWithSection(const std::string& name) {
    for (const KeySpec& key : AllKeys()) {
      const std::string section = EnvironmentName(key.path.substr(0, key.path.find('.'))) + "_";
      if (name.compare(0, section.size(), section) == 0) return true;
    }
    return false;
  }

  // Variables that Kubernetes adds to every pod for a Service named spectrumkv or spectrumkv-peer:
  // SPECTRUMKV_PEER_SERVICE_HOST, SPECTRUMKV_PEER_PORT, SPECTRUMKV_PEER_PORT_7420_TCP_ADDR, ...
  static bool IsServiceLink(const std::string& name) {
    if (name.find("_SERVICE_HOST") != std::string::npos || name.find("_SERVICE_PORT") != std::string::npos) return true;
    const size_t port = name.rfind("_PORT");
    if (port != std::string::npos && port + 5 == name.size()) return true;
    for (size_t at = name.find("_PORT_"); at != std::string::npos; at = name.find("_PORT_", at + 1)) {
      if (at + 6 < name.size() && name[at + 6] >= '0' && name[at + 6] <= '9') return true;
    }
    return false;
  }

  Config config_;
  std::map<std::string, std::string> places_;  // of the value in force; absent: default
  std::set<std::string> refused_;
  std::vector<std::string> errors_;
};

}  // namespace

absl::StatusOr<Config> LoadConfigText(const std::string& name, const std::string& yaml, const ConfigSources& sources) {
  if (yaml.size() > kMaxTextFileBytes) {
    return TextFileError(absl::StatusCode::kInvalidArgument, kWhat, name, "is larger than 1 MiB");
  }
  Loader loader;
  loader.ApplyYaml(name, yaml);
  loader.ApplyEnvironment(sources.env);
  loader.ApplySets(sources.sets);
  return loader.Finish();
}

absl::StatusOr<Config> LoadConfig(const ConfigSources& sources) {
  std::string text;
  if (!sources.file.empty()) {
    absl::StatusOr<std::string> read = ReadTextFile(kWhat, sources.file);
    if (!read.ok()) return read.status();
    text = *std::move(read);
  }
  return LoadConfigText(sources.file, text, sources);
}

}  // namespace spectrumkv
