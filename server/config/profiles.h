// Model profiles: small YAML files that `spectrumkvctl profile` writes and the daemon reads from policy.profile_dir at its
// start. docs/allocators.md, "Model profiles", says what is in them and what it is for.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spectrumkv {

struct ProfileFile {
  std::string name;  // of the file, without .yaml
  std::string model;
  std::string revision;  // "": of any
  double k_weight = 0;   // 0: the default
  // Relative squared error by tier name; tiers that are not in them have the default.
  std::map<std::string, double> k_errors, v_errors;
  // By index of the layer in the model; empty: all alike.
  std::vector<double> layer_weights, layer_budgets;
};

// The text of one file. What is in the section `measured` is for people and not read. InvalidArgument, reason
// INVALID_PROFILE: the first thing that is wrong, as NAME.yaml:line:column.
absl::StatusOr<ProfileFile> ParseProfile(const std::string& name, const std::string& text);

// Every *.yaml of the directory, by name; "": none. Reasons CONFIG_FILE (the directory, or a file in it, cannot be read; more
// than 1000 files) and INVALID_PROFILE (also two files of one model and revision).
absl::StatusOr<std::vector<ProfileFile>> LoadProfiles(const std::string& directory);

// That of the model and revision, else that of the model and any revision, else null.
const ProfileFile* FindProfile(const std::vector<ProfileFile>& profiles, const std::string& model,
                               const std::string& revision);

}  // namespace spectrumkv
