// What TransferManagerImpl knows of owners: whose a transfer is, and how many one may have.
#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"

namespace spectrumkv {

absl::Status TransferManagerImpl::CheckQuotas(const NewHalf& half) const {
  const auto refuse = [this](MetricQuota quota, const char* reason, const char* key, uint32_t limit) {
    parts_.metrics->CountQuotaRefused(quota);
    return MakeError(absl::StatusCode::kResourceExhausted, reason,
                     absl::StrCat("already ", limit, " transfers are active, all that ", key, " allows"),
                     {{"field", key}, {"value", absl::StrCat(uint64_t{limit} + 1)}, {"limit", absl::StrCat(limit)}},
                     kTransferRetryMs);
  };
  const auto owner = active_of_owner_.find(half.owner);
  if (owner != active_of_owner_.end() && owner->second >= options_.max_active_per_user) {
    return refuse(MetricQuota::kTransfers, "TRANSFERS_QUOTA", "quota.transfers_per_user", options_.max_active_per_user);
  }
  const auto pool = active_of_pool_.find(half.pool_id);  // none: what the cache has is of no pool
  if (!half.pool_id.empty() && pool != active_of_pool_.end() && pool->second >= options_.max_active_per_pool) {
    return refuse(MetricQuota::kPoolTransfers, "POOL_TRANSFERS_QUOTA", "quota.transfers_per_pool",
                  options_.max_active_per_pool);
  }
  return absl::OkStatus();
}

std::optional<absl::Status> TransferManagerImpl::FindRepeat(const Caller& caller, const std::string& transfer_id, Role role,
                                                            PartId part, const std::string& fingerprint) {
  std::lock_guard<std::mutex> lock(mutex_);
  Forget();
  const auto it = entries_.find({role, transfer_id});
  if (it == entries_.end()) return std::nullopt;
  if (!CheckOwner(it->second.owner, caller, "transfer_id").ok()) return TransferExists(transfer_id);
  return FindPart(it->second, it->first, part, fingerprint);
}

absl::StatusOr<TransferManagerImpl::Key> TransferManagerImpl::KeyOf(const Caller& caller, const std::string& transfer_id,
                                                                    std::optional<Role> role) const {
  const Key sender{Role::kSender, transfer_id}, receiver{Role::kReceiver, transfer_id};
  absl::Status why = UnknownTransfer(transfer_id);
  const auto may = [&](const Key& key) {
    const auto it = entries_.find(key);
    if (it == entries_.end()) return false;
    absl::Status own = CheckOwner(it->second.owner, caller, "transfer_id");
    if (!own.ok()) why = own;
    return own.ok();
  };
  if (role.has_value()) {
    const Key& key = *role == Role::kSender ? sender : receiver;
    if (may(key)) return key;
    return why;
  }
  const bool sends = may(sender), receives = may(receiver);
  if (sends && receives) {
    return MakeError(absl::StatusCode::kInvalidArgument, "AMBIGUOUS_ROLE",
                     absl::StrCat("both halves of transfer ", transfer_id, " are in this daemon: set role"));
  }
  if (!sends && !receives) return why;
  return sends ? sender : receiver;
}

}  // namespace spectrumkv
