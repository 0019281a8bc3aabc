#include "client/cpp/policies.h"

namespace spectrumkv::client {

v1::Policy AutoBudget(double target_seconds) {
  v1::Policy policy;
  policy.mutable_auto_budget()->set_target_seconds(target_seconds);
  return policy;
}

v1::Policy AutoBudget(double target_seconds, double min_budget) {
  v1::Policy policy = AutoBudget(target_seconds);
  policy.mutable_auto_budget()->set_min_budget(min_budget);
  return policy;
}

}  // namespace spectrumkv::client
