// v1.Policy as flags, shared by plan, send and publish.
#pragma once

#include <string>
#include <vector>

#include "client/ctl/args.h"
#include "spectrumkv/v1/policy.pb.h"

namespace spectrumkv::ctl {

std::vector<Flag> PolicyFlags();
// RAW, Q8, ...; another word is refused in `args`.
v1::Tier ReadTier(const std::string& text, Args* args);
// Remembers errors in `args`. Reads the file of --scores.
v1::Policy ReadPolicy(Args* args);

}  // namespace spectrumkv::ctl
