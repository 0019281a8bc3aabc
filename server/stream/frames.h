// What daemons say to each other, as plain data; meaning as in proto/spectrumkv/v1/peer_service.proto.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace spectrumkv {

enum class Role : uint8_t { kSender = 1, kReceiver = 2 };

// Numbers as TransferState in report.proto.
enum class TransferState : uint8_t {
  kWaiting = 1,
  kPlanned = 2,
  kStreaming = 3,
  kVerifying = 4,
  kCommitted = 5,
  kFailed = 6,
  kCancelled = 7,
  kExpired = 8
};
constexpr bool IsTerminal(TransferState s) { return s >= TransferState::kCommitted; }

struct FrameRun {
  uint32_t first = 0;
  uint32_t count = 0;
};

struct GroupShapeFrame {
  int32_t kind = 0;       // GroupKind numbers of schema.proto
  int32_t data_type = 0;  // DataType numbers of schema.proto
  uint32_t heads_total = 0, head_first = 0, head_count = 0, head_dim = 0;
  std::vector<uint32_t> layers;
  bool has_v = true;
};
struct PoolShapeFrame {
  std::string model, revision;
  std::vector<GroupShapeFrame> groups;
};

struct RefineFrame {
  std::string transfer_id;
  int32_t tier = 0;  // Tier numbers of policy.proto
  std::vector<std::vector<FrameRun>> token_sets;
  struct Strip {
    uint32_t layer = 0;
    bool values = false;
    uint32_t token_set = 0;
  };
  std::vector<Strip> strips;
  bool verify = false;
};
struct RetentionFrame {
  uint64_t retain_ms = 0;
  uint32_t peer_port = 0;
  int32_t background_tier = 0;  // as RefineFrame::tier; 0: none
};

struct HelloFrame {
  uint32_t format_version = 1;
  uint64_t epoch = 0;
  Role role = Role::kSender;
  std::string transfer_id, transfer_token;
  uint32_t part_index = 0, part_count = 1, attempt = 1;
  uint64_t expected_epoch = 0;
  uint64_t deadline_ms = 0;
  PoolShapeFrame shape;
  uint32_t token_count = 0;
  bool accept_dropped = false, outcome_only = false;
  std::optional<RefineFrame> refine = std::nullopt;
};
struct HelloReplyFrame {
  uint64_t epoch = 0, session = 0;
  PoolShapeFrame shape;
};
struct ManifestFrame {
  uint32_t token_count = 0;
  std::vector<FrameRun> kept_tokens;
  PoolShapeFrame shape;
  uint64_t chunk_count = 0;
  uint32_t streams = 1;
  std::optional<RetentionFrame> retention = std::nullopt;
  std::vector<uint32_t> checksums = {};
};
struct AcceptFrame {
  uint64_t fence = 0;
  std::vector<FrameRun> chunks_received;
  uint32_t credits = 0, streams = 1;
  bool refinable = false;
};
struct CreditFrame {
  uint32_t credits = 0;
};
struct HeartbeatFrame {
  std::string reason;
};
struct CancelFrame {
  TransferState cause = TransferState::kCancelled;
  int32_t code = 0;
  std::string reason, message;
};
struct ReceiptFrame {
  TransferState state = TransferState::kFailed;
  int32_t code = 0;
  std::string reason, message;
  uint64_t chunks_received = 0, chunks_duplicate = 0;
  double first_layer_ready_seconds = 0, span_seconds = 0, busy_seconds = 0;
  bool decoded_on_gpu = false;
};
using ControlFrame = std::variant<HelloFrame, HelloReplyFrame, ManifestFrame, AcceptFrame, CreditFrame, HeartbeatFrame,
                                  CancelFrame, ReceiptFrame>;

struct DataOpenFrame {
  std::string transfer_id;
  uint32_t part_index = 0, attempt = 1, stream = 0;
  uint64_t session = 0;
};

// Bytes of the message that carries the frame.
size_t MessageBytes(const ControlFrame& frame);
size_t MessageBytes(const DataOpenFrame& open);

}  // namespace spectrumkv
