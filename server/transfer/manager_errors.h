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

inline absl::Status UnknownPart(const std::string& transfer_id, uint32_t part_index) {
  return MakeError(absl::StatusCode::kNotFound, "UNKNOWN_PART",
                   absl::StrCat("transfer ", transfer_id, " has no part ", part_index, " in this daemon"),
                   {{"part", absl::StrCat(part_index)}});
}

// `why`: how the transfer ended, or is about to.
inline absl::Status PartTooLate(const std::string& transfer_id, const absl::Status& why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "TRANSFER_TERMINAL",
                   absl::StrCat("transfer ", transfer_id, " has ended, no part can join it: ", ReasonOf(why), " ",
                                std::string(why.message())));
}

// What a peer's hello may be refused by.
inline absl::Status UnsupportedVersion(uint32_t format_version) {
  return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_VERSION",
                   absl::StrCat("chunk format version ", format_version, ", this daemon speaks 1"));
}

inline absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining");
}

inline absl::Status PeerRestarted() {
  return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_RESTARTED",
                   "the peer daemon has restarted since the transfer began");
}

inline absl::Status TokenOfAnother() {
  return MakeError(absl::StatusCode::kPermissionDenied, "TOKEN_MISMATCH", "transfer_token is not that of the other half");
}

inline absl::Status SourceMoves() {
  return MakeError(absl::StatusCode::kUnavailable, "SOURCE_MOVED", "the source moves into the daemon's cache: ask again");
}

inline absl::Status StillRetained(const std::string& transfer_id) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "STILL_RETAINED",
                   absl::StrCat("transfer ", transfer_id, " is retained for refinements, which must end first"));
}

inline absl::Status NotRetained(const std::string& transfer_id) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "NOT_RETAINED",
                   absl::StrCat("nothing is kept to refine transfer ", transfer_id,
                                ": its destination was not opened as refinable, its policy had no retain_seconds, a "
                                "daemon is full (refine.max_retained) or older than refinement, or the time is over"),
                   {{"transfer_id", transfer_id}});
}

}  // namespace spectrumkv
