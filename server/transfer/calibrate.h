// How fast this machine codes, measured before the first transfer: so that times can be predicted from the start.
#pragma once

#include "kernels/codec/backend.h"
#include "server/base/clock.h"
#include "server/transfer/transfer_manager.h"

namespace spectrumkv {

// Codes and decodes one made-up chunk of each tier family, the quickest of three runs each. Takes some milliseconds.
// REQUIRES: backend.supported().
StageSpeeds MeasureStages(const Backend& backend, Clock* clock);

}  // namespace spectrumkv
