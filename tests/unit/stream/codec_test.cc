// Bounds of frames, the hand-written Data messages against protobuf, and statuses across gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/base/status.h"
#include "server/stream/data_codec.h"
#include "server/stream/frame_codec.h"
#include "server/stream/status_codec.h"

namespace spectrumkv {
namespace {

PoolShapeFrame SmallShape() {
  PoolShapeFrame shape{"smollm2", "r1", {}};
  shape.groups.push_back({1, 2, 8, 4, 4, 64, {0, 2, 29}, true});
  return shape;
}

HelloFrame GoodHello() {
  HelloFrame hello;
  hello.epoch = 0xFEDCBA9876543210;
  hello.role = Role::kReceiver;
  hello.transfer_id = "t-1";
  hello.transfer_token = std::string("\0\1\2\3\4\5\6\7\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8", 16);
  hello.part_index = 2;
  hello.part_count = 3;
  hello.attempt = 4;
  hello.expected_epoch = 5;
  hello.deadline_ms = 6;
  hello.shape = SmallShape();
  hello.token_count = 768;
  hello.accept_dropped = hello.outcome_only = true;
  return hello;
}

std::string FieldOf(const absl::StatusOr<ControlFrame>& frame) {
  if (frame.ok()) return "accepted";
  if (frame.status().code() != absl::StatusCode::kInvalidArgument) return "wrong code";
  if (ReasonOf(frame.status()) != "MALFORMED_FRAME") return "wrong reason";
  return MetadataOf(frame.status())["field"];
}

// Through bytes, and back to the same bytes.
ControlFrame RoundTrip(const ControlFrame& frame) {
  const std::string bytes = FrameToProto(frame).SerializeAsString();
  v1::ControlFrame proto;
  EXPECT_TRUE(proto.ParseFromString(bytes));
  absl::StatusOr<ControlFrame> back = FrameFromProto(proto);
  EXPECT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->index(), frame.index());
  EXPECT_EQ(FrameToProto(*back).SerializeAsString(), bytes);
  return *std::move(back);
}

TEST(FrameCodec, HelloKeepsEveryField) {
  const HelloFrame want = GoodHello();
  const auto got = std::get<HelloFrame>(RoundTrip(want));
  EXPECT_EQ(got.format_version, want.format_version);
  EXPECT_EQ(got.epoch, want.epoch);
  EXPECT_EQ(got.role, want.role);
  EXPECT_EQ(got.transfer_id, want.transfer_id);
  EXPECT_EQ(got.transfer_token, want.transfer_token);
  EXPECT_EQ(got.part_index, want.part_index);
  EXPECT_EQ(got.part_count, want.part_count);
  EXPECT_EQ(got.attempt, want.attempt);
  EXPECT_EQ(got.expected_epoch, want.expected_epoch);
  EXPECT_EQ(got.deadline_ms, want.deadline_ms);
  EXPECT_EQ(got.token_count, want.token_count);
  EXPECT_TRUE(got.accept_dropped && got.outcome_only);
  ASSERT_EQ(got.shape.groups.size(), 1u);
  EXPECT_EQ(got.shape.model, "smollm2");
  EXPECT_EQ(got.shape.revision, "r1");
  const GroupShapeFrame& group = got.shape.groups[0];
  EXPECT_EQ(group.kind, 1);
  EXPECT_EQ(group.data_type, 2);
  EXPECT_EQ(group.heads_total, 8u);
  EXPECT_EQ(group.head_first, 4u);
  EXPECT_EQ(group.head_count, 4u);
  EXPECT_EQ(group.head_dim, 64u);
  EXPECT_THAT(group.layers, testing::ElementsAre(0, 2, 29));
  EXPECT_TRUE(group.has_v);
}

TEST(FrameCodec, TheOtherFramesKeepEveryField) {
  const auto reply = std::get<HelloReplyFrame>(RoundTrip(HelloReplyFrame{1, 2, SmallShape()}));
  EXPECT_EQ(reply.epoch, 1u);
  EXPECT_EQ(reply.session, 2u);
  EXPECT_EQ(reply.shape.groups.size(), 1u);
  const auto manifest =
      std::get<ManifestFrame>(RoundTrip(ManifestFrame{100, {{0, 4}, {4, 1}, {90, 10}}, SmallShape(), 60, 2}));
  EXPECT_EQ(manifest.token_count, 100u);
  ASSERT_EQ(manifest.kept_tokens.size(), 3u);
  EXPECT_EQ(manifest.kept_tokens[2].first, 90u);
  EXPECT_EQ(manifest.kept_tokens[2].count, 10u);
  EXPECT_EQ(manifest.chunk_count, 60u);
  EXPECT_EQ(manifest.streams, 2u);
  const auto accept = std::get<AcceptFrame>(RoundTrip(AcceptFrame{9, {{7, 1}}, 4, 2}));
  EXPECT_EQ(accept.fence, 9u);
  EXPECT_EQ(accept.chunks_received.at(0).first, 7u);
  EXPECT_EQ(accept.credits, 4u);
  EXPECT_EQ(accept.streams, 2u);
  EXPECT_EQ(std::get<CreditFrame>(RoundTrip(CreditFrame{3})).credits, 3u);
  EXPECT_EQ(std::get<HeartbeatFrame>(RoundTrip(HeartbeatFrame{"waiting_peer"})).reason, "waiting_peer");
  const auto cancel = std::get<CancelFrame>(RoundTrip(CancelFrame{TransferState::kExpired, 4, "R", "m"}));
  EXPECT_EQ(cancel.cause, TransferState::kExpired);
  EXPECT_EQ(cancel.code, 4);
  EXPECT_EQ(cancel.reason, "R");
  EXPECT_EQ(cancel.message, "m");
  const auto receipt =
      std::get<ReceiptFrame>(RoundTrip(ReceiptFrame{TransferState::kCommitted, 0, "", "", 60, 1, 0.25, 0.5, 0.125, true}));
  EXPECT_EQ(receipt.state, TransferState::kCommitted);
  EXPECT_EQ(receipt.chunks_received, 60u);
  EXPECT_EQ(receipt.chunks_duplicate, 1u);
  EXPECT_EQ(receipt.first_layer_ready_seconds, 0.25);
  EXPECT_EQ(receipt.span_seconds, 0.5);
  EXPECT_TRUE(receipt.decoded_on_gpu);
  EXPECT_EQ(receipt.busy_seconds, 0.125);
}

TEST(FrameCodec, HelloBounds) {
  const auto field = [](const std::function<void(HelloFrame*)>& change) {
    HelloFrame hello = GoodHello();
    change(&hello);
    return FieldOf(FrameFromProto(FrameToProto(hello)));
  };
  EXPECT_EQ(field([](HelloFrame*) {}), "accepted");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_id.assign(128, 'x'); }), "accepted");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_id = "no space"; }), "hello.transfer_id");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_id.assign(129, 'x'); }), "hello.transfer_id");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_id.clear(); }), "hello.transfer_id");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_token.clear(); }), "accepted");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_token = "15 bytes long.."; }), "hello.transfer_token");
  EXPECT_EQ(field([](HelloFrame* h) { h->transfer_token = "17 bytes long...."; }), "hello.transfer_token");
  EXPECT_EQ(field([](HelloFrame* h) { h->role = static_cast<Role>(3); }), "hello.role");
  EXPECT_EQ(field([](HelloFrame* h) { h->role = static_cast<Role>(0); }), "hello.role");
  EXPECT_EQ(field([](HelloFrame* h) { h->part_index = 3; }), "hello.part_index");
  EXPECT_EQ(field([](HelloFrame* h) { h->part_count = 0; }), "hello.part_count");
  EXPECT_EQ(field([](HelloFrame* h) { h->part_count = 4097; }), "hello.part_count");
  EXPECT_EQ(field([](HelloFrame* h) { h->attempt = 0; }), "hello.attempt");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups.resize(64, h->shape.groups[0]); }), "accepted");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups.resize(65, h->shape.groups[0]); }), "shape.groups");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].layers.resize(1024); }), "accepted");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].layers.resize(1025); }), "shape.groups.layers");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].layers[0] = 65'536; }), "shape.groups.layers");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].kind = 0; }), "shape.groups.kind");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].kind = 5; }), "shape.groups.kind");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].data_type = 7; }), "shape.groups.data_type");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.groups[0].head_first = 0xFFFFFFFF; }), "shape.groups.head_count");
  EXPECT_EQ(field([](HelloFrame* h) { h->shape.model.assign(257, 'm'); }), "shape.model");
}

TEST(FrameCodec, RefinementsKeepEveryField) {
  HelloFrame want = GoodHello();
  want.refine = RefineFrame{"t-0", 7, {{{0, 4}, {9, 1}}, {{700, 68}}}, {{2, false, 0}, {2, true, 1}, {29, false, 1}}, true};
  const auto got = std::get<HelloFrame>(RoundTrip(want));
  ASSERT_TRUE(got.refine.has_value());
  EXPECT_EQ(got.refine->transfer_id, "t-0");
  EXPECT_EQ(got.refine->tier, 7);
  EXPECT_TRUE(got.refine->verify);
  ASSERT_EQ(got.refine->token_sets.size(), 2u);
  EXPECT_EQ(got.refine->token_sets[0].at(1).first, 9u);
  ASSERT_EQ(got.refine->strips.size(), 3u);
  EXPECT_EQ(got.refine->strips[2].layer, 29u);
  EXPECT_TRUE(got.refine->strips[1].values);
  EXPECT_EQ(got.refine->strips[1].token_set, 1u);
  EXPECT_FALSE(std::get<HelloFrame>(RoundTrip(GoodHello())).refine.has_value());
  ManifestFrame manifest{100, {{0, 100}}, SmallShape(), 60, 2};
  EXPECT_FALSE(std::get<ManifestFrame>(RoundTrip(manifest)).retention.has_value());
  manifest.retention = RetentionFrame{30000, 7420, 7};
  manifest.checksums = {1, 0xFFFFFFFF};
  const auto kept = std::get<ManifestFrame>(RoundTrip(manifest));
  ASSERT_TRUE(kept.retention.has_value());
  EXPECT_EQ(kept.retention->retain_ms, 30000u);
  EXPECT_EQ(kept.retention->peer_port, 7420u);
  EXPECT_EQ(kept.retention->background_tier, 7);
  EXPECT_THAT(kept.checksums, testing::ElementsAre(1, 0xFFFFFFFF));
  AcceptFrame accept{9, {}, 4, 2};
  accept.refinable = true;
  EXPECT_TRUE(std::get<AcceptFrame>(RoundTrip(accept)).refinable);
}

TEST(FrameCodec, RefinementBounds) {
  const auto field = [](const std::function<void(RefineFrame*)>& change) {
    HelloFrame hello = GoodHello();
    hello.refine = RefineFrame{"t-0", 1, {{{0, 4}}}, {{2, false, 0}}};
    change(&*hello.refine);
    return FieldOf(FrameFromProto(FrameToProto(hello)));
  };
  EXPECT_EQ(field([](RefineFrame*) {}), "accepted");
  EXPECT_EQ(field([](RefineFrame* r) { r->transfer_id = "no space"; }), "hello.refine.transfer_id");
  EXPECT_EQ(field([](RefineFrame* r) { r->tier = 0; }), "hello.refine.tier");
  EXPECT_EQ(field([](RefineFrame* r) { r->tier = 8; }), "hello.refine.tier");  // DROP
  EXPECT_EQ(field([](RefineFrame* r) { r->strips.clear(); }), "hello.refine.strips");
  EXPECT_EQ(field([](RefineFrame* r) { r->strips.resize(2048, r->strips[0]); }), "accepted");
  EXPECT_EQ(field([](RefineFrame* r) { r->strips.resize(2049, r->strips[0]); }), "hello.refine.strips");
  EXPECT_EQ(field([](RefineFrame* r) { r->strips[0].token_set = 1; }), "hello.refine.strips.token_set");
  EXPECT_EQ(field([](RefineFrame* r) { r->strips[0].layer = 65'536; }), "hello.refine.strips.layer");
  EXPECT_EQ(field([](RefineFrame* r) { r->token_sets[0].clear(); }), "hello.refine.token_sets");
  EXPECT_EQ(field([](RefineFrame* r) { r->token_sets[0] = {{5, 1}, {4, 1}}; }), "hello.refine.token_sets");
  EXPECT_EQ(field([](RefineFrame* r) { r->token_sets[0] = {{767, 2}}; }), "hello.refine.token_sets");
  EXPECT_EQ(field([](RefineFrame* r) { r->token_sets.resize(2049, r->token_sets[0]); }), "hello.refine.token_sets");
  const auto all_runs = [](size_t sets) {
    return [sets](RefineFrame* r) {
      r->token_sets.assign(sets, {});
      for (auto& set : r->token_sets) {
        for (uint32_t i = 0; i < 256; ++i) set.push_back({2 * i, 1});
      }
    };
  };
  EXPECT_EQ(field(all_runs(256)), "accepted");
  EXPECT_EQ(field(all_runs(257)), "hello.refine.token_sets");
  ManifestFrame manifest{100, {}, {}, 1, 1};
  manifest.retention = RetentionFrame{86'400'001, 1};
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(manifest))), "manifest.retention.retain_ms");
  manifest.retention = RetentionFrame{1, 1, 8};
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(manifest))), "manifest.retention.background_tier");
  manifest.retention = RetentionFrame{1, 65'536};
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(manifest))), "manifest.retention.peer_port");
}

TEST(FrameCodec, RunsMustAscendInsideTheTokens) {
  const auto field = [](uint32_t tokens, std::vector<FrameRun> runs) {
    return FieldOf(FrameFromProto(FrameToProto(ManifestFrame{tokens, std::move(runs), {}, 1, 1})));
  };
  EXPECT_EQ(field(10, {{0, 5}, {5, 5}}), "accepted");
  EXPECT_EQ(field(10, {{0, 5}, {4, 5}}), "manifest.kept_tokens");
  EXPECT_EQ(field(10, {{5, 1}, {0, 1}}), "manifest.kept_tokens");
  EXPECT_EQ(field(10, {{5, 0}}), "manifest.kept_tokens");
  EXPECT_EQ(field(10, {{5, 6}}), "manifest.kept_tokens");
  EXPECT_EQ(field(0xFFFFFFFF, {{0xFFFFFFFF, 0xFFFFFFFF}}), "manifest.kept_tokens");
  std::vector<FrameRun> many;
  for (uint32_t i = 0; i < (1u << 20); ++i) many.push_back({2 * i, 1});
  EXPECT_EQ(field(0xFFFFFFFF, many), "accepted");
  many.push_back({1u << 30, 1});
  EXPECT_EQ(field(0xFFFFFFFF, many), "manifest.kept_tokens");
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(AcceptFrame{1, {{0xFFFFFFFF, 1}}, 1, 1}))), "accepted");
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(AcceptFrame{1, {{0xFFFFFFFF, 2}}, 1, 1}))), "accept.chunks_received");
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(AcceptFrame{1, {}, (1u << 20) + 1, 1}))), "accept.credits");
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(AcceptFrame{1, {}, 1, 65}))), "accept.streams");
}

TEST(FrameCodec, RefusesStatesThatAreNotTerminal) {
  ReceiptFrame receipt;
  receipt.state = TransferState::kVerifying;
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.state");
  receipt.state = TransferState::kFailed;
  for (const int32_t code : {-1, 0, 17}) {
    receipt.code = code;
    EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.code") << code;
  }
  receipt.state = TransferState::kCommitted;
  receipt.code = 5;
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.code") << "a commit that is an error";
  receipt.state = TransferState::kFailed;
  receipt.first_layer_ready_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.first_layer_ready_seconds");
  receipt.first_layer_ready_seconds = 0;
  receipt.span_seconds = -1;
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.span_seconds");
  receipt.span_seconds = 0;
  receipt.busy_seconds = std::numeric_limits<double>::infinity();
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(receipt))), "receipt.busy_seconds");
  CancelFrame cancel;
  cancel.cause = TransferState::kCommitted;
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(cancel))), "cancel.cause");
  cancel.cause = TransferState::kFailed;
  for (const int32_t code : {-1, 0, 17}) {
    cancel.code = code;
    EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(cancel))), "cancel.code") << code;
  }
  EXPECT_EQ(FieldOf(FrameFromProto(v1::ControlFrame())), "frame");
  EXPECT_EQ(FieldOf(FrameFromProto(FrameToProto(CreditFrame{0}))), "credit.credits");
}

// What a peer says is shown to workers and administrators.
TEST(FrameCodec, WordsOfAPeerMayBeShown) {
  const std::string bad = "a\n2026-01-01T00:00:00Z error forged \x1b[2J", shown = "a?2026-01-01T00:00:00Z error forged ?[2J";
  const auto heard = [](const ControlFrame& said) { return *FrameFromProto(FrameToProto(said)); };
  const auto cancel = std::get<CancelFrame>(heard(CancelFrame{TransferState::kFailed, 14, bad, bad}));
  EXPECT_EQ(cancel.reason, shown);
  EXPECT_EQ(cancel.message, shown);
  const auto receipt = std::get<ReceiptFrame>(heard(ReceiptFrame{TransferState::kFailed, 14, bad, bad}));
  EXPECT_EQ(receipt.reason, shown);
  EXPECT_EQ(receipt.message, shown);
}

TEST(FrameCodec, CutsLongTextBetweenCharacters) {
  CancelFrame cancel;
  cancel.code = 1;
  cancel.message = std::string(1023, 'x') + "\xc3\xa9";  // the last character straddles the bound
  const auto back = std::get<CancelFrame>(RoundTrip(cancel));
  EXPECT_EQ(back.message, std::string(1023, 'x'));
}

absl::StatusOr<DataMessage> ParseCut(const std::string& bytes, size_t piece) {
  std::vector<ByteSpan> pieces;
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  for (size_t at = 0; at < bytes.size(); at += piece) {
    pieces.push_back({data + at, std::min(piece, bytes.size() - at)});
    pieces.push_back({nullptr, 0});
  }
  return ParseDataMessage(pieces);
}

TEST(DataCodec, ReadsWhatProtobufWritesHoweverItIsCut) {
  for (size_t chunk_bytes : {0, 1, 127, 128, 5000, 20'000}) {
    v1::DataRequest request;
    request.set_chunk(std::string(chunk_bytes, 'c'));
    const std::string bytes = request.SerializeAsString();
    for (size_t piece : {1, 2, 3, 7, 4096, 100'000}) {
      auto parsed = ParseCut(bytes, piece);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      const auto extent = std::get<ChunkExtent>(*parsed);
      EXPECT_EQ(extent.bytes, chunk_bytes);
      EXPECT_EQ(extent.offset, bytes.size() - chunk_bytes);
    }
  }
}

TEST(DataCodec, ProtobufReadsWhatItWrites) {
  for (size_t chunk_bytes : {0, 1, 127, 128, 16'383, 16'384, 1 << 20}) {
    uint8_t prefix[kMaxChunkPrefixBytes];
    const size_t n = WriteChunkPrefix(chunk_bytes, prefix);
    const std::string bytes = std::string(reinterpret_cast<const char*>(prefix), n) + std::string(chunk_bytes, 'z');
    v1::DataResponse response;
    ASSERT_TRUE(response.ParseFromString(bytes));
    EXPECT_EQ(response.chunk().size(), chunk_bytes);
    EXPECT_EQ(response.SerializeAsString(), bytes);
  }
  uint8_t prefix[kMaxChunkPrefixBytes];
  EXPECT_EQ(WriteChunkPrefix(std::numeric_limits<size_t>::max(), prefix), kMaxChunkPrefixBytes);
  const DataOpenFrame open{"t", 1, 2, 3, 4};
  const auto parsed = ParseCut(SerializeDataOpen(open), 3);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const auto got = std::get<DataOpenFrame>(*parsed);
  EXPECT_EQ(got.transfer_id, "t");
  EXPECT_EQ(got.part_index, 1u);
  EXPECT_EQ(got.attempt, 2u);
  EXPECT_EQ(got.stream, 3u);
  EXPECT_EQ(got.session, 4u);
}

TEST(DataCodec, RefusesBrokenMessages) {
  const auto reason = [](const std::string& bytes) {
    const auto parsed = ParseCut(bytes, 2);
    return parsed.ok() ? std::string("accepted") : ReasonOf(parsed.status());
  };
  using namespace std::string_literals;
  EXPECT_EQ(reason(""), "MALFORMED_FRAME");
  EXPECT_EQ(reason("\x12"), "MALFORMED_FRAME");
  EXPECT_EQ(reason("\x12\x05"
                   "abc"),
            "MALFORMED_FRAME");
  EXPECT_EQ(reason("\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "MALFORMED_FRAME") << "2^64 - 1 bytes";
  EXPECT_EQ(reason("\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), "MALFORMED_FRAME") << "a varint of 70 bits";
  EXPECT_EQ(reason("\x0a\x02\xff\xff"), "MALFORMED_FRAME");
  EXPECT_EQ(reason("\x0b"), "MALFORMED_FRAME") << "a group";
  EXPECT_EQ(reason("\0\0"s), "MALFORMED_FRAME") << "field 0";
  EXPECT_EQ(reason("\x1a\x01x"), "MALFORMED_FRAME") << "only an unknown field";
  EXPECT_EQ(reason("\x1a\x01x\x12\x01y"), "accepted") << "an unknown field beside a chunk";
  EXPECT_EQ(reason("\x12\x01y\x1d"
                   "abcd\x20\x07\x29"
                   "12345678"),
            "accepted");
  EXPECT_EQ(reason("\x12\x01y\x1d"
                   "abc"),
            "MALFORMED_FRAME");
  v1::DataRequest no_id;
  no_id.mutable_open()->set_attempt(1);
  EXPECT_EQ(reason(no_id.SerializeAsString()), "MALFORMED_FRAME");
}

TEST(StatusCodec, KeepsCodeReasonMetadataAndRetry) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status want = MakeError(static_cast<absl::StatusCode>(code), "SOME_REASON_1",
                                        "what went wrong: \xc3\xa9", {{"field", "heads"}, {"value", "12"}}, 1234);
    const grpc::Status wire = ToGrpcStatus(want);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    const absl::Status got = FromGrpcStatus(wire);
    EXPECT_EQ(got.code(), want.code());
    EXPECT_EQ(got.message(), want.message());
    EXPECT_EQ(ReasonOf(got), "SOME_REASON_1");
    EXPECT_EQ(MetadataOf(got), MetadataOf(want));
    EXPECT_EQ(RetryAfterMsOf(got), 1234);
  }
  EXPECT_TRUE(FromGrpcStatus(ToGrpcStatus(absl::OkStatus())).ok());
  const absl::Status plain = FromGrpcStatus(ToGrpcStatus(absl::NotFoundError("x")));
  EXPECT_EQ(plain.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(plain), "");
  EXPECT_EQ(RetryAfterMsOf(plain), -1);
}

TEST(StatusCodec, StaysInsideTrailersAndTextBounds) {
  Metadata metadata;
  for (int i = 0; i < 100; ++i) metadata["key" + std::to_string(i)] = std::string(100, 'v');
  const grpc::Status wire = ToGrpcStatus(MakeError(absl::StatusCode::kInternal, "BIG",
                                                   std::string("bad \xff byte ") + std::string(10'000, 'm'), metadata));
  // Percent-encoding may triple the message, base64 adds a third to the details.
  EXPECT_LT(wire.error_message().size() * 3 + wire.error_details().size() * 4 / 3, 8000u);
  const absl::Status got = FromGrpcStatus(wire);
  EXPECT_EQ(ReasonOf(got), "BIG");
  EXPECT_EQ(std::string(got.message()).substr(0, 10), "bad ? byte");
  EXPECT_GE(MetadataOf(got).size(), 10u);
}

TEST(StatusCodec, TextMayBeShown) {
  google::rpc::ErrorInfo info;
  info.set_reason("SOME_REASON");
  info.set_domain("spectrumkv");
  (*info.mutable_metadata())["fi\neld"] = "\x1b[2J";
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  const absl::Status got =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "a\r\nb", details.SerializeAsString()));
  EXPECT_EQ(got.message(), "a??b");
  EXPECT_EQ(MetadataOf(got), (Metadata{{"fi?eld", "?[2J"}}));
  const grpc::Status wire = ToGrpcStatus(MakeError(absl::StatusCode::kNotFound, "R", "no\tsuch \x7f", {{"v", "\n"}}));
  EXPECT_EQ(wire.error_message(), "no?such ?");
  EXPECT_EQ(MetadataOf(FromGrpcStatus(wire)), (Metadata{{"v", "?"}}));
}

TEST(StatusCodec, IgnoresDetailsThatAreNotOurs) {
  EXPECT_EQ(ReasonOf(FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "m", "\xff\xff garbage"))), "");
}

}  // namespace
}  // namespace spectrumkv
