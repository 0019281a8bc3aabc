#include "server/lifecycle/certificate_watch.h"

#include <mutex>
#include <string>
#include <utility>

#include "server/base/log.h"
#include "server/base/status.h"

namespace spectrumkv {

struct CertificateWatch::State {
  std::mutex mutex;
  Parts parts;
  bool stopped = false;
  TimerId timer = 0;
  std::string last_failure;  // told once, not at each look
};

CertificateWatch::CertificateWatch(Parts parts) : state_(std::make_shared<State>()) {
  state_->parts = std::move(parts);
  std::lock_guard<std::mutex> lock(state_->mutex);
  Arm(state_);
}

CertificateWatch::~CertificateWatch() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopped = true;
  state_->parts.clock->Cancel(state_->timer);
}

void CertificateWatch::Arm(const std::shared_ptr<State>& state) {
  const Parts& parts = state->parts;
  state->timer = parts.clock->CallAt(parts.clock->NowNs() + parts.interval_ms * 1'000'000, [state] {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (!state->stopped) state->parts.executor->Post([state] { Look(state); });
  });
}

void CertificateWatch::Look(const std::shared_ptr<State>& state) {
  std::lock_guard<std::mutex> lock(state->mutex);
  if (state->stopped) return;
  Metrics& metrics = *state->parts.metrics;
  bool changed = false;
  absl::Status failure;
  for (const auto& reload : state->parts.reloads) {
    const absl::StatusOr<bool> answer = reload();
    if (!answer.ok()) failure = answer.status();
    changed = changed || (answer.ok() && *answer);
  }
  if (changed) {
    const absl::StatusOr<int64_t> expiry = state->parts.expiry();
    if (expiry.ok()) metrics.SetCertificateExpiry(static_cast<double>(*expiry));
    metrics.CountCertificateReload(MetricReload::kOk);
    SPECTRUMKV_LOG(kInfo, "lifecycle", "new peer certificates are in use", {"expires", expiry.value_or(0)});
  }
  const std::string words(failure.message());
  if (!failure.ok() && words != state->last_failure) {
    metrics.CountCertificateReload(MetricReload::kFailed);
    SPECTRUMKV_LOG(kError, "lifecycle", "changed peer certificates are not used, the old ones stay",
                   {"reason", ReasonOf(failure)}, {"error", words});
  }
  state->last_failure = words;
  Arm(state);
}

}  // namespace spectrumkv
