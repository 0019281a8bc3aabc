// Words of errors about transfers as a whole. Internal to server/transfer.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/base/status.h"

namespace spectrumkv {

constexpr int64_t kTransferRetryMs = 200;

inline absl::Status UnknownTransfer(const std::string& transfer_id) {
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_TRANSFER",
                   absl::StrCat("no transfer ", transfer_id, " in this daemon"), {{"transfer_id", transfer_id}});
}

inline absl::Status TransferExists(const std::string& transfer_id) {
  return MakeError(absl::StatusCode::kAlreadyExists, "TRANSFER_EXISTS",
                   absl::StrCat("transfer ", transfer_id, " exists with another request, or has ended"),
                   {{"transfer_id", transfer_id}});
}

}  // namespace spectrumkv
