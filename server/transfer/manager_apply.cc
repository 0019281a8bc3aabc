// ApplyRefinement: at once, or when the worker's event on its GPU has been reached.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/status.h"
#include "server/memory/device_events.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/units.h"

namespace spectrumkv {
namespace {

// How often an event is asked for: at first a fraction of a step of a model.
constexpr int64_t kFirstPollNs = 100'000, kLastPollNs = 2'000'000;

}  // namespace

struct TransferManagerImpl::Applying {
  ApplySpec spec;
  std::shared_ptr<Refinement> refinement;
  std::unique_ptr<DeviceEvents> event;
  int64_t give_up_ns = 0, poll_ns = kFirstPollNs;
  std::function<void(absl::StatusOr<RefinementApplied>)> done;
};

absl::StatusOr<std::shared_ptr<Refinement>> TransferManagerImpl::RefinementOf(const ApplySpec& spec) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const absl::StatusOr<Key> key = KeyOf(spec.owner, spec.refine_id, Role::kReceiver);
  if (!key.ok()) return key.status();
  std::shared_ptr<Refinement> refinement = entries_.at(*key).refinement;
  if (refinement == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_A_REFINEMENT",
                     absl::StrCat("transfer ", spec.refine_id, " is no refinement"));
  }
  // The blocks are the worker's again once it has released the transfer.
  const Key base{Role::kReceiver, refinement->base().transfer_id};
  if (entries_.count(base) == 0 && kept_.count(base) == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_RETAINED",
                     absl::StrCat("transfer ", base.second, " has been released"));
  }
  return refinement;
}

void TransferManagerImpl::ApplyRefinement(ApplySpec spec, std::function<void(absl::StatusOr<RefinementApplied>)> done) {
  auto refinement = RefinementOf(spec);
  if (!refinement.ok()) return done(refinement.status());
  if (spec.read_event.empty()) return done(ApplyNow(spec.refine_id, spec.max_bytes, refinement->get()));
  Device* const device = (*refinement)->base().device;
  if (device == nullptr) {
    return done(MakeError(absl::StatusCode::kInvalidArgument, "NOT_ON_DEVICE",
                          "read_event is given, but the destination is in host memory", {{"field", "read_event"}}));
  }
  auto applying = std::make_shared<Applying>();
  applying->event = std::make_unique<DeviceEvents>(device);
  if (absl::Status added = applying->event->Add(spec.read_event); !added.ok()) return done(added);
  if (!(*refinement)->BeginWaiting()) {
    return done(MakeError(absl::StatusCode::kResourceExhausted, "APPLY_PENDING",
                          absl::StrCat("another ApplyRefinement of ", spec.refine_id, " waits for its event"), {}, kTransferRetryMs));
  }
  applying->spec = std::move(spec);
  applying->refinement = *std::move(refinement);
  applying->give_up_ns = parts_.clock->NowNs() + options_.progress_timeout_ms * kMsToNs;
  applying->done = std::move(done);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
  }
  ApplyWhenReached(std::move(applying));
}

void TransferManagerImpl::ApplyWhenReached(std::shared_ptr<Applying> applying) {
  const absl::StatusOr<bool> reached = applying->event->Reached();
  absl::Status over = reached.ok() ? absl::OkStatus() : reached.status();
  if (over.ok() && !*reached && parts_.clock->NowNs() >= applying->give_up_ns) {
    over = MakeError(absl::StatusCode::kDeadlineExceeded, "EVENT_NOT_REACHED",
                     absl::StrCat("read_event has not been reached within ", options_.progress_timeout_ms,
                                  " ms (transfer.progress_timeout_ms)"));
  }
  if (over.ok() && stopping_.load()) over = MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the daemon is shutting down");
  if (over.ok() && applying->refinement->closed()) over = NotRetained(applying->refinement->base().transfer_id);
  if (over.ok() && applying->spec.given_up && applying->spec.given_up()) {
    over = MakeError(absl::StatusCode::kCancelled, "CANCELLED", "whoever called has gone");
  }
  if (!over.ok() || *reached) applying->refinement->EndWaiting();
  if (!over.ok()) {
    applying->done(over);
    return CallEnded();
  }
  if (*reached) {
    parts_.compute->Post([this, applying] {
      applying->done(ApplyNow(applying->spec.refine_id, applying->spec.max_bytes, applying->refinement.get()));
      CallEnded();
    });
    return;
  }
  const int64_t again_ns = parts_.clock->NowNs() + applying->poll_ns;
  applying->poll_ns = std::min(2 * applying->poll_ns, kLastPollNs);
  parts_.clock->CallAt(again_ns, [this, applying] {
    parts_.control->Post([this, applying] { ApplyWhenReached(applying); });
  });
}

absl::StatusOr<RefinementApplied> TransferManagerImpl::ApplyNow(const std::string& refine_id, uint64_t max_bytes,
                                                                Refinement* refinement) {
  const auto applied = refinement->Apply(max_bytes);
  if (!applied.ok()) return applied.status();
  parts_.metrics->AddAppliedBytes(applied->bytes);
  TransferReport now;
  refinement->AddTo(&now);
  const bool complete = refinement->complete();
  NoteExact({Role::kReceiver, refinement->base().transfer_id}, *refinement);
  if (now.cells_left > 0 && refinement->base().IsOwn(refine_id) && refinement->TakeCompletion()) {
    RefineInBackground(refinement->base().transfer_id);
  }
  return RefinementApplied{applied->bytes, now.staged_bytes, applied->stale_cells, complete, now.exact};
}

}  // namespace spectrumkv
