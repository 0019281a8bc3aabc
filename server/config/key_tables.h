// What the files with rows of the table of keys share. Internal to server/config.
#pragma once

#include <vector>

#include "server/config/keys.h"

namespace spectrumkv {

inline constexpr double kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB;
inline constexpr double kHourMs = 3600 * 1000;

// The member of Config that a key sets.
#define FIELD(member) [](Config& config) -> decltype((config.member)) { return config.member; }

// Lambdas convert to the function pointers of FieldRef only when told which one.
template <typename Lambda>
FieldRef Ref(Lambda lambda) {
  return FieldRef(+lambda);
}

// keys_worker.cc: who may call, and how much each may have.
std::vector<KeySpec> MakeWorkerKeys();
// keys_quality.cc: which tiers a model may use.
std::vector<KeySpec> MakeQualityKeys();
// keys_refine.cc: better precision for what has arrived.
std::vector<KeySpec> MakeRefineKeys();

}  // namespace spectrumkv
