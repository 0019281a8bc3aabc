#include "server/stream/frame_codec.h"

#include <cmath>
#include <string>
#include <utility>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/base/text.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxReasonBytes = 128;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxMessageBytes = 1024;
constexpr size_t kTokenBytes = 16;
constexpr int kMaxGroups = 64;
constexpr int kMaxLayers = 1024;
constexpr int kMaxRuns = 1 << 20;
constexpr uint32_t kMaxParts = 4096;
constexpr uint32_t kMaxStreams = 64;
constexpr uint32_t kMaxCredits = 1u << 20;
constexpr uint32_t kMaxHeads = 1u << 20;
constexpr uint64_t kMaxRefineRuns = 1 << 16;
constexpr uint64_t kMaxRetainMs = 24ull * 3600 * 1000;
constexpr uint64_t kEndOfIndices = uint64_t{1} << 32;

// Collects the first thing that is wrong.
class Checker {
 public:
  void Require(bool good, const char* field, const std::string& what) {
    if (!good && status_.ok()) status_ = MalformedFrame(field, what);
  }
  void AtMost(uint64_t value, uint64_t limit, const char* field) {
    Require(value <= limit, field, "is " + std::to_string(value) + ", at most " + std::to_string(limit) + " allowed");
  }
  void Range(int64_t value, int64_t first, int64_t last, const char* field) {
    Require(value >= first && value <= last, field,
            "is " + std::to_string(value) + ", allowed " + std::to_string(first) + ".." + std::to_string(last));
  }
  void Text(const std::string& text, size_t limit, const char* field) {
    Require(text.size() <= limit, field,
            "has " + std::to_string(text.size()) + " bytes, at most " + std::to_string(limit) + " allowed");
  }
  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

// proto3 strings must be UTF-8, and a cut must not split a character.
std::string Cut(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  size_t end = limit;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

void CheckTransferId(const std::string& id, const char* field, Checker* check) {
  check->Require(IsId(id), field, "has " + std::to_string(id.size()) + " bytes and is not " + IdRule());
}

template <typename Runs>
std::vector<FrameRun> RunsFrom(const Runs& runs, uint64_t end, const char* field, Checker* check) {
  std::vector<FrameRun> out;
  check->AtMost(static_cast<uint64_t>(runs.size()), kMaxRuns, field);
  if (!check->ok()) return out;
  out.reserve(static_cast<size_t>(runs.size()));
  uint64_t previous_end = 0;
  for (const auto& run : runs) {
    const uint64_t run_end = uint64_t{run.first()} + run.count();
    check->Require(run.count() > 0, field, "has an empty run");
    check->Require(run.first() >= previous_end, field, "has runs that overlap or do not ascend");
    check->Require(run_end <= end, field,
                   "has a run that ends at " + std::to_string(run_end) + ", past " + std::to_string(end));
    if (!check->ok()) return out;
    previous_end = run_end;
    out.push_back({run.first(), run.count()});
  }
  return out;
}

template <typename Out>
void RunsTo(const std::vector<FrameRun>& runs, Out* out) {
  out->Reserve(static_cast<int>(runs.size()));
  for (const FrameRun& run : runs) {
    auto* added = out->Add();
    added->set_first(run.first);
    added->set_count(run.count);
  }
}

PoolShapeFrame ShapeFrom(const v1::PoolShape& proto, Checker* check) {
  PoolShapeFrame shape;
  check->Text(proto.model(), kMaxNameBytes, "shape.model");
  check->Text(proto.revision(), kMaxNameBytes, "shape.revision");
  check->AtMost(static_cast<uint64_t>(proto.groups_size()), kMaxGroups, "shape.groups");
  if (!check->ok()) return shape;
  shape.model = proto.model();
  shape.revision = proto.revision();
  for (const auto& group : proto.groups()) {
    check->Range(group.kind(), v1::GROUP_KIND_ATTENTION, v1::GROUP_KIND_OPAQUE_STATE, "shape.groups.kind");
    check->Range(group.data_type(), v1::DATA_TYPE_FLOAT16, v1::DATA_TYPE_OPAQUE_BYTES, "shape.groups.data_type");
    check->AtMost(group.heads_total(), kMaxHeads, "shape.groups.heads_total");
    check->AtMost(uint64_t{group.head_first()} + group.head_count(), group.heads_total(), "shape.groups.head_count");
    check->AtMost(group.head_dim(), kMaxHeads, "shape.groups.head_dim");
    check->AtMost(static_cast<uint64_t>(group.layers_size()), kMaxLayers, "shape.groups.layers");
    if (!check->ok()) return shape;
    GroupShapeFrame out;
    out.kind = group.kind();
    out.data_type = group.data_type();
    out.heads_total = group.heads_total();
    out.head_first = group.head_first();
    out.head_count = group.head_count();
    out.head_dim = group.head_dim();
    out.layers.assign(group.layers().begin(), group.layers().end());
    for (uint32_t layer : out.layers) check->AtMost(layer, 65'535, "shape.groups.layers");
    out.has_v = group.has_v();
    shape.groups.push_back(std::move(out));
  }
  return shape;
}

void ShapeTo(const PoolShapeFrame& shape, v1::PoolShape* proto) {
  proto->set_model(shape.model);
  proto->set_revision(shape.revision);
  for (const GroupShapeFrame& group : shape.groups) {
    auto* out = proto->add_groups();
    out->set_kind(static_cast<v1::GroupKind>(group.kind));
    out->set_data_type(static_cast<v1::DataType>(group.data_type));
    out->set_heads_total(group.heads_total);
    out->set_head_first(group.head_first);
    out->set_head_count(group.head_count);
    out->set_head_dim(group.head_dim);
    out->mutable_layers()->Add(group.layers.begin(), group.layers.end());
    out->set_has_v(group.has_v);
  }
}

RefineFrame RefineFrom(const v1::Refine& proto, uint32_t token_count, Checker* check) {
  RefineFrame out;
  CheckTransferId(proto.transfer_id(), "hello.refine.transfer_id", check);
  check->Range(proto.tier(), v1::TIER_RAW, v1::TIER_Q8, "hello.refine.tier");
  check->AtMost(static_cast<uint64_t>(proto.token_sets_size()), 2 * kMaxLayers, "hello.refine.token_sets");
  check->Range(proto.strips_size(), 1, 2 * kMaxLayers, "hello.refine.strips");
  if (!check->ok()) return out;
  uint64_t runs = 0;
  for (const auto& set : proto.token_sets()) {
    runs += static_cast<uint64_t>(set.tokens_size());
    check->Require(set.tokens_size() > 0, "hello.refine.token_sets", "have an empty set");
    check->AtMost(runs, kMaxRefineRuns, "hello.refine.token_sets");
    if (!check->ok()) return out;
    out.token_sets.push_back(RunsFrom(set.tokens(), token_count, "hello.refine.token_sets", check));
  }
  for (const auto& strip : proto.strips()) {
    check->Require(strip.token_set() < out.token_sets.size(), "hello.refine.strips.token_set",
                   "is " + std::to_string(strip.token_set()) + " of " + std::to_string(out.token_sets.size()));
    check->AtMost(strip.layer(), 65'535, "hello.refine.strips.layer");
    out.strips.push_back({strip.layer(), strip.values(), strip.token_set()});
  }
  out.transfer_id = proto.transfer_id();
  out.tier = proto.tier();
  out.verify = proto.verify();
  return out;
}

void RefineTo(const RefineFrame& refine, v1::Refine* proto) {
  proto->set_transfer_id(refine.transfer_id);
  proto->set_tier(static_cast<v1::Tier>(refine.tier));
  proto->set_verify(refine.verify);
  for (const auto& set : refine.token_sets) RunsTo(set, proto->add_token_sets()->mutable_tokens());
  for (const RefineFrame::Strip& strip : refine.strips) {
    auto* out = proto->add_strips();
    out->set_layer(strip.layer);
    out->set_values(strip.values);
    out->set_token_set(strip.token_set);
  }
}

HelloFrame HelloFrom(const v1::Hello& proto, Checker* check) {
  check->Range(proto.role(), 1, 2, "hello.role");
  CheckTransferId(proto.transfer_id(), "hello.transfer_id", check);
  check->Require(proto.transfer_token().empty() || proto.transfer_token().size() == kTokenBytes, "hello.transfer_token",
                 "has " + std::to_string(proto.transfer_token().size()) + " bytes, 0 or 16 allowed");
  check->Range(proto.part_count(), 1, kMaxParts, "hello.part_count");
  check->Require(proto.part_index() < proto.part_count(), "hello.part_index",
                 "is " + std::to_string(proto.part_index()) + ", must be below part_count");
  check->Require(proto.attempt() >= 1, "hello.attempt", "is 0");
  HelloFrame out;
  out.shape = ShapeFrom(proto.shape(), check);
  if (!check->ok()) return out;
  out.format_version = proto.format_version();
  out.epoch = proto.epoch();
  out.role = static_cast<Role>(proto.role());
  out.transfer_id = proto.transfer_id();
  out.transfer_token = proto.transfer_token();
  out.part_index = proto.part_index();
  out.part_count = proto.part_count();
  out.attempt = proto.attempt();
  out.expected_epoch = proto.expected_epoch();
  out.deadline_ms = proto.deadline_ms();
  out.token_count = proto.token_count();
  out.accept_dropped = proto.accept_dropped();
  out.outcome_only = proto.outcome_only();
  if (proto.has_refine()) out.refine = RefineFrom(proto.refine(), proto.token_count(), check);
  return out;
}

HelloReplyFrame HelloReplyFrom(const v1::HelloReply& proto, Checker* check) {
  return HelloReplyFrame{proto.epoch(), proto.session(), ShapeFrom(proto.shape(), check)};
}

ManifestFrame ManifestFrom(const v1::Manifest& proto, Checker* check) {
  check->AtMost(proto.chunk_count(), kEndOfIndices, "manifest.chunk_count");
  check->AtMost(proto.streams(), kMaxStreams, "manifest.streams");
  ManifestFrame out;
  out.token_count = proto.token_count();
  out.kept_tokens = RunsFrom(proto.kept_tokens(), proto.token_count(), "manifest.kept_tokens", check);
  out.shape = ShapeFrom(proto.shape(), check);
  out.chunk_count = proto.chunk_count();
  out.streams = proto.streams();
  if (proto.has_retention()) {
    check->AtMost(proto.retention().retain_ms(), kMaxRetainMs, "manifest.retention.retain_ms");
    check->AtMost(proto.retention().peer_port(), 65'535, "manifest.retention.peer_port");
    check->Range(proto.retention().background_tier(), v1::TIER_UNSPECIFIED, v1::TIER_Q8,
                 "manifest.retention.background_tier");
    out.retention = RetentionFrame{proto.retention().retain_ms(), proto.retention().peer_port(),
                                   proto.retention().background_tier()};
  }
  check->AtMost(static_cast<uint64_t>(proto.checksums_size()), 2 * kMaxLayers * kMaxGroups, "manifest.checksums");
  if (check->ok()) out.checksums.assign(proto.checksums().begin(), proto.checksums().end());
  return out;
}

AcceptFrame AcceptFrom(const v1::Accept& proto, Checker* check) {
  check->AtMost(proto.credits(), kMaxCredits, "accept.credits");
  check->AtMost(proto.streams(), kMaxStreams, "accept.streams");
  AcceptFrame out;
  out.fence = proto.fence();
  out.chunks_received = RunsFrom(proto.chunks_received(), kEndOfIndices, "accept.chunks_received", check);
  out.credits = proto.credits();
  out.streams = proto.streams();
  out.refinable = proto.refinable();
  return out;
}

CancelFrame CancelFrom(const v1::Cancel& proto, Checker* check) {
  check->Range(proto.cause(), v1::TRANSFER_STATE_FAILED, v1::TRANSFER_STATE_EXPIRED, "cancel.cause");
  check->Range(proto.code(), 1, 16, "cancel.code");
  check->Text(proto.reason(), kMaxReasonBytes, "cancel.reason");
  check->Text(proto.message(), kMaxMessageBytes, "cancel.message");
  if (!check->ok()) return {};
  return CancelFrame{static_cast<TransferState>(proto.cause()), proto.code(), CleanText(proto.reason(), kMaxReasonBytes),
                     CleanText(proto.message(), kMaxMessageBytes)};
}

ReceiptFrame ReceiptFrom(const v1::Receipt& proto, Checker* check) {
  check->Range(proto.state(), v1::TRANSFER_STATE_COMMITTED, v1::TRANSFER_STATE_EXPIRED, "receipt.state");
  const bool committed = proto.state() == v1::TRANSFER_STATE_COMMITTED;
  check->Range(proto.code(), committed ? 0 : 1, committed ? 0 : 16, "receipt.code");
  check->Text(proto.reason(), kMaxReasonBytes, "receipt.reason");
  check->Text(proto.message(), kMaxMessageBytes, "receipt.message");
  const auto seconds = [&](double value, const char* field) {
    check->Require(std::isfinite(value) && value >= 0, field, "is negative or not finite");
    return value;
  };
  const double first_layer = seconds(proto.first_layer_ready_seconds(), "receipt.first_layer_ready_seconds");
  const double span = seconds(proto.span_seconds(), "receipt.span_seconds");
  const double busy = seconds(proto.busy_seconds(), "receipt.busy_seconds");
  if (!check->ok()) return {};
  return ReceiptFrame{static_cast<TransferState>(proto.state()),
                      proto.code(),
                      CleanText(proto.reason(), kMaxReasonBytes),
                      CleanText(proto.message(), kMaxMessageBytes),
                      proto.chunks_received(),
                      proto.chunks_duplicate(),
                      first_layer,
                      span,
                      busy,
                      proto.decoded_on_gpu()};
}

// One overload per frame: how it is written.
void Put(const HelloFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_hello();
  out->set_format_version(in.format_version);
  out->set_epoch(in.epoch);
  out->set_role(static_cast<v1::TransferRole>(in.role));
  out->set_transfer_id(in.transfer_id);
  out->set_transfer_token(in.transfer_token);
  out->set_part_index(in.part_index);
  out->set_part_count(in.part_count);
  out->set_attempt(in.attempt);
  out->set_expected_epoch(in.expected_epoch);
  out->set_deadline_ms(in.deadline_ms);
  ShapeTo(in.shape, out->mutable_shape());
  out->set_token_count(in.token_count);
  out->set_accept_dropped(in.accept_dropped);
  out->set_outcome_only(in.outcome_only);
  if (in.refine.has_value()) RefineTo(*in.refine, out->mutable_refine());
}
void Put(const HelloReplyFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_hello_reply();
  out->set_epoch(in.epoch);
  out->set_session(in.session);
  ShapeTo(in.shape, out->mutable_shape());
}
void Put(const ManifestFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_manifest();
  out->set_token_count(in.token_count);
  RunsTo(in.kept_tokens, out->mutable_kept_tokens());
  ShapeTo(in.shape, out->mutable_shape());
  out->set_chunk_count(in.chunk_count);
  out->set_streams(in.streams);
  if (in.retention.has_value()) {
    out->mutable_retention()->set_retain_ms(in.retention->retain_ms);
    out->mutable_retention()->set_peer_port(in.retention->peer_port);
    out->mutable_retention()->set_background_tier(static_cast<v1::Tier>(in.retention->background_tier));
  }
  out->mutable_checksums()->Add(in.checksums.begin(), in.checksums.end());
}
void Put(const AcceptFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_accept();
  out->set_fence(in.fence);
  RunsTo(in.chunks_received, out->mutable_chunks_received());
  out->set_credits(in.credits);
  out->set_streams(in.streams);
  out->set_refinable(in.refinable);
}
void Put(const CreditFrame& in, v1::ControlFrame* frame) { frame->mutable_credit()->set_credits(in.credits); }
void Put(const HeartbeatFrame& in, v1::ControlFrame* frame) {
  frame->mutable_heartbeat()->set_reason(Cut(in.reason, kMaxReasonBytes));
}
void Put(const CancelFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_cancel();
  out->set_cause(static_cast<v1::TransferState>(in.cause));
  out->set_code(in.code);
  out->set_reason(Cut(in.reason, kMaxReasonBytes));
  out->set_message(Cut(in.message, kMaxMessageBytes));
}
void Put(const ReceiptFrame& in, v1::ControlFrame* frame) {
  auto* out = frame->mutable_receipt();
  out->set_state(static_cast<v1::TransferState>(in.state));
  out->set_code(in.code);
  out->set_reason(Cut(in.reason, kMaxReasonBytes));
  out->set_message(Cut(in.message, kMaxMessageBytes));
  out->set_chunks_received(in.chunks_received);
  out->set_chunks_duplicate(in.chunks_duplicate);
  out->set_first_layer_ready_seconds(in.first_layer_ready_seconds);
  out->set_span_seconds(in.span_seconds);
  out->set_busy_seconds(in.busy_seconds);
  out->set_decoded_on_gpu(in.decoded_on_gpu);
}

}  // namespace

absl::Status MalformedFrame(const std::string& field, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "MALFORMED_FRAME", field + " " + what, {{"field", field}});
}

v1::ControlFrame FrameToProto(const ControlFrame& frame) {
  v1::ControlFrame proto;
  std::visit([&proto](const auto& alternative) { Put(alternative, &proto); }, frame);
  return proto;
}

size_t MessageBytes(const ControlFrame& frame) {
  v1::ControlRequest message;
  *message.mutable_frame() = FrameToProto(frame);
  return message.ByteSizeLong();
}

absl::StatusOr<ControlFrame> FrameFromProto(const v1::ControlFrame& proto) {
  Checker check;
  ControlFrame frame;
  switch (proto.frame_case()) {
    case v1::ControlFrame::kHello: frame = HelloFrom(proto.hello(), &check); break;
    case v1::ControlFrame::kHelloReply: frame = HelloReplyFrom(proto.hello_reply(), &check); break;
    case v1::ControlFrame::kManifest: frame = ManifestFrom(proto.manifest(), &check); break;
    case v1::ControlFrame::kAccept: frame = AcceptFrom(proto.accept(), &check); break;
    case v1::ControlFrame::kCredit:
      check.Range(proto.credit().credits(), 1, kMaxCredits, "credit.credits");
      frame = CreditFrame{proto.credit().credits()};
      break;
    case v1::ControlFrame::kHeartbeat:
      check.Text(proto.heartbeat().reason(), kMaxReasonBytes, "heartbeat.reason");
      frame = HeartbeatFrame{proto.heartbeat().reason()};
      break;
    case v1::ControlFrame::kCancel: frame = CancelFrom(proto.cancel(), &check); break;
    case v1::ControlFrame::kReceipt: frame = ReceiptFrom(proto.receipt(), &check); break;
    case v1::ControlFrame::FRAME_NOT_SET: return MalformedFrame("frame", "is missing or of a kind unknown here");
  }
  if (!check.ok()) return check.status();
  return frame;
}

v1::DataOpen DataOpenToProto(const DataOpenFrame& open) {
  v1::DataOpen proto;
  proto.set_transfer_id(open.transfer_id);
  proto.set_part_index(open.part_index);
  proto.set_attempt(open.attempt);
  proto.set_stream(open.stream);
  proto.set_session(open.session);
  return proto;
}

absl::StatusOr<DataOpenFrame> DataOpenFromProto(const v1::DataOpen& proto) {
  Checker check;
  CheckTransferId(proto.transfer_id(), "open.transfer_id", &check);
  check.Require(proto.part_index() < kMaxParts, "open.part_index", "is " + std::to_string(proto.part_index()));
  check.Require(proto.attempt() >= 1, "open.attempt", "is 0");
  check.Require(proto.stream() < kMaxStreams, "open.stream", "is " + std::to_string(proto.stream()));
  if (!check.ok()) return check.status();
  return DataOpenFrame{proto.transfer_id(), proto.part_index(), proto.attempt(), proto.stream(), proto.session()};
}

}  // namespace spectrumkv
