#include "server/plan/budget.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

std::string RoundedUp(double budget) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6f", std::ceil(budget * 1e6) / 1e6);
  // Printing rounds to nearest: make sure the text does not lie below the value.
  if (std::strtod(text, nullptr) < budget) std::snprintf(text, sizeof text, "%.6f", std::ceil(budget * 1e6 + 1) / 1e6);
  return text;
}

}  // namespace

uint64_t BudgetBytes(double budget, uint64_t kv_bytes) {
  return static_cast<uint64_t>(std::floor(budget * static_cast<double>(kv_bytes)));
}

double LeastBudgetFor(uint64_t bytes, uint64_t kv_bytes) {
  double budget = static_cast<double>(bytes) / static_cast<double>(kv_bytes);
  while (BudgetBytes(budget, kv_bytes) < bytes)
    budget = std::nextafter(budget, std::numeric_limits<double>::infinity());
  for (;;) {
    const double less = std::nextafter(budget, 0.0);
    if (less <= 0 || BudgetBytes(less, kv_bytes) < bytes) return budget;
    budget = less;
  }
}

absl::Status BudgetTooSmall(double budget, uint64_t bytes, uint64_t kv_bytes) {
  const std::string least = RoundedUp(LeastBudgetFor(bytes, kv_bytes));
  return MakeError(absl::StatusCode::kInvalidArgument, "BUDGET_TOO_SMALL",
                   "policy.budget " + std::to_string(budget) + " is below the least possible " + least + " (" +
                       std::to_string(bytes) + " of " + std::to_string(kv_bytes) + " raw bytes)",
                   {{"budget", std::to_string(budget)}, {"least_budget", least}});
}

absl::Status DropNotAllowed(double budget, uint64_t bytes, uint64_t kv_bytes, const char* allocator) {
  const std::string least = RoundedUp(LeastBudgetFor(bytes, kv_bytes));
  return MakeError(absl::StatusCode::kInvalidArgument, "DROP_NOT_ALLOWED",
                   std::string("policy.allocator ") + allocator + " must drop tokens at policy.budget " +
                       std::to_string(budget) + ", but policy.tiers does not name DROP; without dropping it needs " +
                       least,
                   {{"budget", std::to_string(budget)}, {"least_budget", least}, {"allocator", allocator}});
}

}  // namespace spectrumkv
