// Budgets as shares and as bytes.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace spectrumkv {

// Whole bytes within `budget`.
uint64_t BudgetBytes(double budget, uint64_t kv_bytes);

// Smallest double for which BudgetBytes is at least `bytes`.
double LeastBudgetFor(uint64_t bytes, uint64_t kv_bytes);

// BUDGET_TOO_SMALL: `bytes` is the least the transfer can cost. Metadata least_budget is rounded up to 6 decimals.
absl::Status BudgetTooSmall(double budget, uint64_t bytes, uint64_t kv_bytes);

// DROP_NOT_ALLOWED, with the budget at which nothing would have to be dropped.
absl::Status DropNotAllowed(double budget, uint64_t bytes, uint64_t kv_bytes, const char* allocator);

}  // namespace spectrumkv
