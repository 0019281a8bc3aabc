#include "server/config/profiles.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "server/base/status.h"
#include "server/config/text_file.h"
#include "server/config/yaml_reader.h"

namespace spectrumkv {
namespace {

constexpr double kLeastValue = 0.001, kMostValue = 1000;
constexpr size_t kMaxLayers = 4096, kMaxProfiles = 1000, kMaxNameBytes = 1024;
constexpr const char* kSuffix = ".yaml";
constexpr const char* kTiers[] = {"P8", "Q4", "Q3", "Q2", "P4", "Q8"};

class ProfileReader {
 public:
  explicit ProfileReader(std::string name) { profile_.name = std::move(name); }

  absl::StatusOr<ProfileFile> Read(const std::string& text) {
    YamlNode root;
    YamlError error;
    if (!ReadYaml(text, &root, &error)) return Wrong(error.line, error.column, error.message);
    if (root.kind != YamlNode::Kind::kMap) return Wrong(root.line, root.column, "is no list of keys and values");
    std::set<std::string> seen;
    for (size_t i = 0; i + 1 < root.children.size(); i += 2) {
      const YamlNode& key = root.children[i];
      if (!seen.insert(key.scalar).second) return At(key, key.scalar + " is there twice");
      if (absl::Status status = Take(key, root.children[i + 1]); !status.ok()) return status;
    }
    if (profile_.model.empty()) return Wrong(1, 1, "names no model");
    return std::move(profile_);
  }

 private:
  absl::Status Wrong(int line, int column, const std::string& what) const {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_PROFILE",
                     profile_.name + kSuffix + ":" + std::to_string(line) + ":" + std::to_string(column) + ": " + what,
                     {{"profile", profile_.name}});
  }
  absl::Status At(const YamlNode& node, const std::string& what) const { return Wrong(node.line, node.column, what); }

  absl::Status Take(const YamlNode& key, const YamlNode& value) {
    if (key.scalar == "measured") return absl::OkStatus();
    if (key.scalar == "model") return Text(key, value, &profile_.model);
    if (key.scalar == "revision") return Text(key, value, &profile_.revision);
    if (key.scalar == "k_weight") return Number(key.scalar, value, kLeastValue, &profile_.k_weight);
    if (key.scalar == "layer_weights") return Numbers(key.scalar, value, &profile_.layer_weights);
    if (key.scalar == "layer_budgets") return Numbers(key.scalar, value, &profile_.layer_budgets);
    if (key.scalar == "k_errors") return Errors(key.scalar, value, &profile_.k_errors);
    if (key.scalar == "v_errors") return Errors(key.scalar, value, &profile_.v_errors);
    return At(key, "unknown key \"" + key.scalar.substr(0, 64) +
                       "\"; there are model, revision, k_weight, k_errors, v_errors, layer_weights, layer_budgets, measured");
  }

  absl::Status Text(const YamlNode& key, const YamlNode& value, std::string* to) const {
    if (value.kind != YamlNode::Kind::kScalar || value.scalar.size() > kMaxNameBytes) {
      return At(value, key.scalar + " must be a text of at most " + std::to_string(kMaxNameBytes) + " bytes");
    }
    *to = value.scalar;
    return absl::OkStatus();
  }

  absl::Status Number(const std::string& name, const YamlNode& value, double least, double* to) const {
    const std::string& text = value.scalar;
    const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), *to);
    const bool number = value.kind == YamlNode::Kind::kScalar && failed == std::errc() && end == text.data() + text.size();
    if (number && *to >= least && *to <= kMostValue) return absl::OkStatus();
    return At(value, name + " must be a number in [" + (least == kLeastValue ? "0.001" : "1e-12") + ", 1000]");
  }

  absl::Status Numbers(const std::string& name, const YamlNode& value, std::vector<double>* to) const {
    if (value.kind != YamlNode::Kind::kList || value.children.size() > kMaxLayers) {
      return At(value, name + " must be a list of at most " + std::to_string(kMaxLayers) + " numbers");
    }
    for (const YamlNode& child : value.children) {
      if (absl::Status status = Number(name, child, kLeastValue, &to->emplace_back()); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Errors(const std::string& name, const YamlNode& value, std::map<std::string, double>* to) const {
    if (value.kind != YamlNode::Kind::kMap) return At(value, name + " must name tiers with their errors");
    for (size_t i = 0; i + 1 < value.children.size(); i += 2) {
      const YamlNode& tier = value.children[i];
      if (std::find(std::begin(kTiers), std::end(kTiers), tier.scalar) == std::end(kTiers)) {
        return At(tier, name + ": \"" + tier.scalar.substr(0, 64) + "\" is not a tier with an error");
      }
      constexpr double kLeastError = 1e-12;
      if (absl::Status status = Number(name, value.children[i + 1], kLeastError, &(*to)[tier.scalar]); !status.ok())
        return status;
    }
    return absl::OkStatus();
  }

  ProfileFile profile_;
};

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& directory) {
  std::vector<std::string> names;
  const std::string suffix = kSuffix;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string file = it->path().filename();
    if (file.size() <= suffix.size() || file[0] == '.' || file.substr(file.size() - suffix.size()) != suffix) continue;
    names.push_back(file.substr(0, file.size() - suffix.size()));
  }
  if (error) {
    return TextFileError(absl::StatusCode::kNotFound, "profile directory", directory,
                         "cannot be opened: " + error.message());
  }
  if (names.size() > kMaxProfiles) {
    return TextFileError(absl::StatusCode::kInvalidArgument, "profile directory", directory,
                         "has more than " + std::to_string(kMaxProfiles) + " files");
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

absl::StatusOr<ProfileFile> ParseProfile(const std::string& name, const std::string& text) {
  return ProfileReader(name).Read(text);
}

absl::StatusOr<std::vector<ProfileFile>> LoadProfiles(const std::string& directory) {
  std::vector<ProfileFile> profiles;
  if (directory.empty()) return profiles;
  const absl::StatusOr<std::vector<std::string>> names = NamesIn(directory);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const absl::StatusOr<std::string> text = ReadTextFile("profile", directory + "/" + name + kSuffix);
    if (!text.ok()) return text.status();
    absl::StatusOr<ProfileFile> profile = ParseProfile(name, *text);
    if (!profile.ok()) return profile.status();
    for (const ProfileFile& other : profiles) {
      if (other.model != profile->model || other.revision != profile->revision) continue;
      return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_PROFILE",
                       "profiles " + other.name + " and " + name + " are of the same model and revision",
                       {{"profile", name}});
    }
    profiles.push_back(*std::move(profile));
  }
  return profiles;
}

const ProfileFile* FindProfile(const std::vector<ProfileFile>& profiles, const std::string& model,
                               const std::string& revision) {
  const ProfileFile* found = nullptr;
  for (const ProfileFile& profile : profiles) {
    if (profile.model != model) continue;
    if (profile.revision == revision) return &profile;
    if (profile.revision.empty()) found = &profile;
  }
  return found;
}

}  // namespace spectrumkv
