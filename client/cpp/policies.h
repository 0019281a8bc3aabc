// Policies that need more than one field.
#pragma once

#include "spectrumkv/v1/policy.pb.h"

namespace spectrumkv::client {

// The daemon takes the least lossy budget whose predicted time meets the target, not below its configured least one;
// the report's budget_choice says which and why. Other fields may be set as well, but not `budget`.
v1::Policy AutoBudget(double target_seconds);
// The same, with the least budget the daemon may take.
v1::Policy AutoBudget(double target_seconds, double min_budget);

}  // namespace spectrumkv::client
