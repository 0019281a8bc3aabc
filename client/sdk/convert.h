// Between the public types and those of proto/spectrumkv/v1.
#pragma once

#include "absl/status/status.h"
#include "spectrumkv/cache.h"
#include "spectrumkv/status.h"
#include "spectrumkv/transfer.h"
#include "spectrumkv/v1/worker_service.pb.h"

namespace spectrumkv {

Status FromAbsl(const absl::Status& status);
// With reason, metadata and delay as payloads, as the daemon's errors have them.
absl::Status ToAbsl(const Status& status);

v1::PoolSchema ToProto(const Cache& cache);
v1::Policy ToProto(const Policy& policy);
v1::TransferKey ToProto(const std::string& transfer_id, Role role);

// Runs of consecutive ids. REQUIRES: `blocks` is a repeated GroupBlocks of a request, empty.
void FillIn(const BlockTables& tables, google::protobuf::RepeatedPtrField<v1::GroupBlocks>* blocks);

Report FromProto(const v1::TransferReport& report);
Progress FromProto(const v1::Progress& progress);
PlanAnswer FromProto(const v1::PlanResponse& response);

}  // namespace spectrumkv
