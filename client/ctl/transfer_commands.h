// Waiting for a transfer, shared by the commands that begin one.
#pragma once

#include "client/ctl/command.h"

namespace spectrumkv::ctl {

// Until the end, within --timeout; prints the report. kOk only if it committed.
absl::StatusOr<int> WaitAndReport(const Context& context, client::Client* worker, const v1::TransferKey& key);

}  // namespace spectrumkv::ctl
