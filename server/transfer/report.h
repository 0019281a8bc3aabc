// What a transfer did, for its report, its events and its metrics. Fields as in proto/spectrumkv/v1/report.proto.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/plan/plan.h"
#include "server/stream/frames.h"
#include "server/transfer/predict.h"

namespace spectrumkv {

enum class Stage : uint8_t { kQueue, kScan, kPlan, kEncode, kSend, kReceive, kDecode, kCommit };
constexpr size_t kStageCount = 8;
const char* StageName(Stage stage);

// Which part of a transfer, as in policy.proto.
struct PartId {
  uint32_t index = 0, count = 1;
};
constexpr uint32_t kMaxParts = 64;

struct TransferReport {
  std::string transfer_id;
  std::string pool_id;  // of the blocks here
  Role role = Role::kSender;
  PartId part;
  std::vector<TransferReport> parts;  // of a whole transfer of several: its parts that are here, ascending
  TransferState state = TransferState::kWaiting;
  absl::Status error;  // not OK for FAILED, CANCELLED, EXPIRED
  uint32_t tokens = 0, kept_tokens = 0;
  uint64_t kv_bytes = 0, wire_bytes = 0;
  double budget = 0;
  uint64_t escape_overrun_bytes = 0;
  TierTotals tiers;
  std::vector<TokenRange> dropped;
  uint64_t chunks = 0, chunks_total = 0, chunks_resent = 0, chunks_duplicate = 0;
  uint64_t nonfinite_values = 0, rounded_words = 0, values = 0;
  Allocator allocator = Allocator::kRaw;
  ImportanceSource importance = ImportanceSource::kPosition;
  std::string model_profile;  // of a sender with OPTIMAL
  std::string backend, path = "host", source_guard = "none";
  uint32_t attempts = 0, streams = 0, layers_ready = 0;
  double first_layer_ready_seconds = 0, duration_seconds = 0;
  std::array<double, kStageCount> stage_seconds{};

  Limit limited_by = Limit::kUnknown;
  double limited_seconds = 0;
  // Of a sender: the link as this transfer saw it, and as the daemon knew it afterwards; the budget it chose.
  std::optional<double> measured_link, link;
  std::optional<BudgetChoice> choice;
  GateOutcome gate;  // of a sender

  double retained_seconds = 0;
  uint64_t refined_wire_bytes = 0;
  // Of a refinement: the transfer it makes better; at its receiver what became of the cells.
  std::string refines;
  uint64_t cells = 0, cells_left = 0, staged_bytes = 0, applied_bytes = 0, stale_cells = 0;
  bool exact = false;  // the checksums of both sides were compared
  bool completes = false;  // at its sender: with it the destination has all that the source has

  CodedBy coded_by() const { return path == "device" ? CodedBy::kGpu : CodedBy::kCpu; }
  // Bytes of the tokens that travelled, by the family of their tier; as if all layers were alike.
  ByFamily KvBytesByFamily() const;
  uint64_t saved_bytes() const {
    const uint64_t moved = wire_bytes + refined_wire_bytes;
    return refines.empty() && kv_bytes > moved ? kv_bytes - moved : 0;
  }
};

}  // namespace spectrumkv
