// Makes the quality gate of a daemon from its configuration, with its verdicts and its metrics.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/config/config.h"
#include "server/metrics/metrics.h"
#include "server/probe/quality_gate.h"

namespace spectrumkv {

class GateKeeper {
 public:
  // `clock` and `metrics` are borrowed. FAILED_PRECONDITION VERDICTS_FILE, with the key: a gate whose verdicts are not
  // to be trusted does not start.
  static absl::StatusOr<std::unique_ptr<GateKeeper>> Open(const Config& config, Clock* clock, Metrics* metrics);
  QualityGate* gate() { return &gate_; }

 private:
  GateKeeper(GateOptions options, Clock* clock, Metrics* metrics);
  VerdictBook verdicts_;
  QualityGate gate_;
};

}  // namespace spectrumkv
