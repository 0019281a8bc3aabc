#include "server/service/convert.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "gtest/gtest.h"
#include "tests/unit/service/expect_error.h"

namespace spectrumkv {
namespace {

v1::PoolSchema GoodSchema() {
  v1::PoolSchema schema;
  schema.set_model("m");
  schema.set_revision("r");
  schema.add_segments()->mutable_posix_shm()->set_name("/x");
  schema.mutable_segments(0)->mutable_posix_shm()->set_size_bytes(4096);
  v1::LayerGroup* group = schema.add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(v1::DATA_TYPE_BFLOAT16);
  group->set_heads_total(8);
  group->set_head_first(2);
  group->set_head_count(4);
  group->set_head_dim(64);
  group->set_block_tokens(16);
  group->set_num_blocks(3);
  v1::LayerTensors* layer = group->add_layers();
  layer->set_layer(5);
  layer->mutable_k()->set_offset_bytes(1);
  layer->mutable_k()->set_block_stride_bytes(2);
  layer->mutable_k()->set_token_stride_bytes(3);
  layer->mutable_k()->set_head_stride_bytes(4);
  layer->mutable_k()->set_dim_stride_bytes(6);
  layer->mutable_v()->set_segment(0);
  return schema;
}

TEST(SchemaFromProto, TakesEveryField) {
  v1::PoolSchema proto = GoodSchema();
  proto.set_tensor_parallel_rank(1);
  proto.set_tensor_parallel_size(2);
  proto.mutable_generations()->set_offset_bytes(9);
  const auto schema = SchemaFromProto(proto);
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(schema->model, "m");
  EXPECT_EQ(schema->tensor_parallel_rank, 1u);
  EXPECT_EQ(schema->segments[0].kind, SegmentSpec::Kind::kPosixShm);
  EXPECT_EQ(schema->segments[0].name, "/x");
  const GroupSchema& group = schema->groups[0];
  EXPECT_EQ(group.dtype, DType::kBFloat16);
  EXPECT_EQ(group.head_first, 2u);
  EXPECT_EQ(group.num_blocks, 3u);
  EXPECT_EQ(group.layers[0].layer, 5u);
  EXPECT_EQ(group.layers[0].k.offset_bytes, 1u);
  EXPECT_EQ(group.layers[0].k.dim_stride_bytes, 6u);
  EXPECT_TRUE(group.layers[0].v.has_value());
  EXPECT_EQ(schema->generations->offset_bytes, 9u);
}

TEST(SchemaFromProto, TakesMemoryOfGpus) {
  v1::PoolSchema proto = GoodSchema();
  v1::CudaIpcSegment* ipc = proto.mutable_segments(0)->mutable_cuda_ipc();
  ipc->set_handle(std::string(64, '\0'));
  ipc->set_device_uuid("GPU-1");
  ipc->set_offset_bytes(512);
  ipc->set_size_bytes(4096);
  auto schema = SchemaFromProto(proto);
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(schema->segments[0].kind, SegmentSpec::Kind::kCudaIpc);
  EXPECT_EQ(schema->segments[0].name, std::string(64, '\0'));
  EXPECT_EQ(schema->segments[0].device, "GPU-1");
  EXPECT_EQ(schema->segments[0].offset_bytes, 512u);
  proto.mutable_segments(0)->mutable_daemon_owned()->set_device("GPU-1");
  schema = SchemaFromProto(proto);
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(schema->segments[0].kind, SegmentSpec::Kind::kDaemonOwned);
  EXPECT_EQ(schema->segments[0].device, "GPU-1");
}

TEST(SchemaFromProto, RefusesWhatThisVersionDoesNotTake) {
  const auto with = [](auto change) {
    v1::PoolSchema schema = GoodSchema();
    change(&schema);
    return SchemaFromProto(schema).status();
  };
  for (const v1::DataType type : {v1::DATA_TYPE_FLOAT8_E4M3, v1::DATA_TYPE_FLOAT8_E5M2, v1::DATA_TYPE_OPAQUE_BYTES}) {
    EXPECT_ERROR(with([&](auto* s) { s->mutable_groups(0)->set_data_type(type); }), kUnimplemented,
                 "UNSUPPORTED_DTYPE");
  }
  EXPECT_ERROR(with([](auto* s) { s->mutable_segments(0)->mutable_cuda_ipc(); }), kInvalidArgument, "INVALID_SCHEMA");
  EXPECT_TRUE(with([](auto* s) { s->mutable_segments(0)->mutable_daemon_owned()->set_device("host"); }).ok());
}

TEST(SchemaFromProto, RefusesWhatMakesNoSense) {
  const auto with = [](auto change) {
    v1::PoolSchema schema = GoodSchema();
    change(&schema);
    return SchemaFromProto(schema).status();
  };
  EXPECT_ERROR(with([](auto* s) { s->clear_groups(); }), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_ERROR(with([](auto* s) { s->clear_segments(); }), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_ERROR(with([](auto* s) { s->mutable_segments(0)->Clear(); }), kInvalidArgument, "INVALID_SCHEMA");
  EXPECT_ERROR(with([](auto* s) { s->set_model(std::string(kMaxNameLength + 1, 'm')); }), kInvalidArgument,
               "INVALID_SCHEMA");
  EXPECT_TRUE(with([](auto* s) { s->set_model(std::string(kMaxNameLength, 'm')); }).ok());
  EXPECT_ERROR(with([](auto* s) { s->set_tensor_parallel_rank(1); }), kInvalidArgument, "INVALID_SCHEMA");
  EXPECT_ERROR(with([](auto* s) { s->mutable_groups(0)->set_kind(v1::GROUP_KIND_UNSPECIFIED); }), kInvalidArgument,
               "INVALID_SCHEMA");
  EXPECT_ERROR(with([](auto* s) { s->mutable_groups(0)->set_data_type(static_cast<v1::DataType>(99)); }),
               kInvalidArgument, "INVALID_SCHEMA");
  EXPECT_ERROR(with([](auto* s) { s->mutable_groups(0)->mutable_layers(0)->clear_k(); }), kInvalidArgument,
               "INVALID_SCHEMA");
  EXPECT_ERROR(with([](auto* s) { s->mutable_groups(0)->mutable_layers(0)->clear_v(); }), kInvalidArgument,
               "INVALID_SCHEMA");
  for (const v1::GroupKind kind : {v1::GROUP_KIND_MLA, v1::GROUP_KIND_OPAQUE_STATE}) {  // which have no V
    EXPECT_ERROR(with([kind](auto* s) { s->mutable_groups(0)->set_kind(kind); }), kInvalidArgument, "INVALID_SCHEMA");
  }
  EXPECT_ERROR(with([](auto* s) {
                 for (int i = 0; i <= kMaxLayers; ++i) *s->mutable_groups(0)->add_layers() = s->groups(0).layers(0);
               }),
               kInvalidArgument, "OUT_OF_RANGE");
}

TEST(DefaultsOf, ComeFromTheConfiguration) {
  Config config;
  config.policy.allocator = "TWO_TIER";
  config.policy.tiers = {"RAW", "P4"};
  config.transfer.max_tokens = 100;
  const auto defaults = DefaultsOf(config);
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  EXPECT_EQ(defaults->policy.allocator, Allocator::kTwoTier);
  EXPECT_EQ(defaults->policy.tiers, (std::vector<Tier>{Tier::kRaw, Tier::kP4}));
  EXPECT_TRUE(CheckTokenCount(100, *defaults).ok());
  EXPECT_ERROR(CheckTokenCount(101, *defaults), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_ERROR(CheckTokenCount(0, *defaults), kInvalidArgument, "OUT_OF_RANGE");
  config.policy.tiers = {"Q5"};
  EXPECT_FALSE(DefaultsOf(config).ok());
}

TEST(Ids, CharactersAndLengths) {
  for (const std::string& good : {std::string("a"), std::string("A-Z_a.z:0-9"), std::string(128, 'x')}) {
    EXPECT_TRUE(CheckTransferId(good).ok()) << good;
    EXPECT_TRUE(CheckRequestId(good).ok()) << good;
  }
  for (const std::string& bad : {std::string(), std::string(129, 'x'), std::string("a b"), std::string("a/b"),
                                 std::string("a\0b", 3), std::string("\xc3\xa4"), std::string("a\nb")}) {
    EXPECT_ERROR(CheckTransferId(bad), kInvalidArgument, "INVALID_TRANSFER_ID");
    EXPECT_ERROR(CheckRequestId(bad), kInvalidArgument, "INVALID_REQUEST_ID");
    // What a worker sends never breaks a line of the log.
    EXPECT_EQ(std::string(CheckTransferId(bad).message()).find('\n'), std::string::npos);
  }
  EXPECT_TRUE(CheckTransferToken("").ok());
  EXPECT_TRUE(CheckTransferToken(std::string(16, '\0')).ok());
  EXPECT_ERROR(CheckTransferToken("secret"), kInvalidArgument, "INVALID_TOKEN");
  EXPECT_EQ(std::string(CheckTransferToken("secret").message()).find("secret"), std::string::npos);
}

TEST(PeerAddress, HostAndPort) {
  for (const char* good : {"host:1", "10.0.0.1:65535", "[::1]:7420", "a-b.example.com:80", "[fe80::1]:1"}) {
    EXPECT_TRUE(CheckPeerAddress(good).ok()) << good;
  }
  for (const char* bad : {"", "host", "host:", ":80", "host:0", "host:65536", "host:99999", "host:1a", "ho st:1",
                          "unix:/tmp/x", "::1:80", "[::1:80", "[]:80", "[x]:80", "dns:///host:80", "host:-1"}) {
    EXPECT_ERROR(CheckPeerAddress(bad), kInvalidArgument, "INVALID_PEER");
  }
}

TEST(PeerAddress, OnlyAllowedHosts) {
  const std::vector<std::string> allowed = {"10.1.0.0/16", "fd00::/8", "*.kv.example"};
  for (const char* good : {"10.1.2.3:7420", "[fd00::1]:7420", "decode-0.kv.example:1"}) {
    EXPECT_TRUE(CheckPeerAddress(good, allowed).ok()) << good;
  }
  for (const char* bad :
       {"10.2.0.1:7420", "127.0.0.1:7420", "[::1]:7420", "169.254.169.254:80", "localhost:22", "kv.example:1"}) {
    EXPECT_ERROR(CheckPeerAddress(bad, allowed), kPermissionDenied, "PEER_NOT_ALLOWED");
  }
  EXPECT_ERROR(CheckPeerAddress("10.1.2.3", allowed), kInvalidArgument, "INVALID_PEER");
}

TEST(Part, OneOfAtMostSixtyFour) {
  const auto of = [](uint32_t index, uint32_t count) {
    v1::Part part;
    part.set_index(index);
    part.set_count(count);
    return PartFromProto(true, part);
  };
  EXPECT_EQ(PartFromProto(false, v1::Part())->count, 1u);
  EXPECT_EQ(of(0, 1)->count, 1u);
  EXPECT_EQ(of(63, 64)->index, 63u);
  for (const auto& [index, count] : {std::pair{0u, 0u}, {1u, 1u}, {64u, 64u}, {0u, 65u}, {UINT32_MAX, UINT32_MAX}}) {
    EXPECT_ERROR(of(index, count).status(), kInvalidArgument, "INVALID_PART");
  }
}

TEST(Durations, DefaultAndLimits) {
  RequestDefaults defaults;
  EXPECT_EQ(*DeadlineOf(0, defaults), defaults.deadline_ms);
  EXPECT_EQ(*DeadlineOf(1, defaults), 1);
  EXPECT_EQ(*DeadlineOf(600000, defaults), 600000);
  EXPECT_ERROR(DeadlineOf(600001, defaults).status(), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_ERROR(DeadlineOf(UINT64_MAX, defaults).status(), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_EQ(*LeaseTtlOf(0, defaults), defaults.lease_ttl_ms);
  EXPECT_ERROR(LeaseTtlOf(999, defaults).status(), kInvalidArgument, "OUT_OF_RANGE");
  EXPECT_EQ(*LeaseTtlOf(1000, defaults), 1000);
}

TEST(Blocks, RunsAreCheckedForOverflow) {
  google::protobuf::RepeatedPtrField<v1::GroupBlocks> proto;
  v1::BlockRun* run = proto.Add()->add_runs();
  run->set_first(4);
  run->set_count(2);
  const auto blocks = BlocksFromProto(proto);
  ASSERT_TRUE(blocks.ok());
  EXPECT_EQ((*blocks)[0].runs[0].first, 4u);
  EXPECT_EQ((*blocks)[0].runs[0].count, 2u);
  run->set_count(0);
  EXPECT_ERROR(BlocksFromProto(proto).status(), kInvalidArgument, "INVALID_BLOCKS");
  run->set_count(UINT64_MAX);
  EXPECT_ERROR(BlocksFromProto(proto).status(), kInvalidArgument, "INVALID_BLOCKS");
  for (int i = 0; i <= kMaxGroups; ++i) proto.Add();
  EXPECT_ERROR(BlocksFromProto(proto).status(), kInvalidArgument, "INVALID_BLOCKS");
}

TEST(Fingerprint, DiffersExactlyWhereTheRequestDiffers) {
  v1::SendRequest a;
  a.set_transfer_id("x");
  a.mutable_policy()->mutable_importance()->add_scores(0.5f);
  v1::SendRequest b = a;
  EXPECT_EQ(FingerprintOf(a), FingerprintOf(b));
  b.mutable_policy()->mutable_importance()->set_scores(0, std::nextafter(0.5f, 1.0f));
  EXPECT_NE(FingerprintOf(a), FingerprintOf(b));
  b = a;
  b.set_layerwise(true);
  EXPECT_NE(FingerprintOf(a), FingerprintOf(b));
}

TEST(Report, TakesEveryField) {
  TransferReport report;
  report.transfer_id = "x";
  report.role = Role::kSender;
  report.state = TransferState::kFailed;
  report.error = MakeError(absl::StatusCode::kDataLoss, "BAD_CHECKSUM", "words");
  report.kv_bytes = 100;
  report.wire_bytes = 40;
  report.values = 80;
  report.tiers.k[static_cast<size_t>(Tier::kQ8)] = 5;
  report.tiers.v[static_cast<size_t>(Tier::kRaw)] = 6;
  report.dropped = {{3, 4}};
  report.allocator = Allocator::kPdTrim;
  report.stage_seconds[static_cast<size_t>(Stage::kEncode)] = 0.5;
  v1::TransferReport proto;
  ReportToProto(report, &proto);
  EXPECT_EQ(proto.state(), v1::TRANSFER_STATE_FAILED);
  EXPECT_EQ(proto.code(), 15);
  EXPECT_EQ(proto.reason(), "BAD_CHECKSUM");
  EXPECT_EQ(proto.saved_bytes(), 60u);
  EXPECT_EQ(proto.bits_per_value(), 4.0);
  ASSERT_EQ(proto.tiers_size(), 2);
  EXPECT_EQ(proto.tiers(0).tier(), v1::TIER_RAW);
  EXPECT_EQ(proto.tiers(0).v_tokens(), 6u);
  EXPECT_EQ(proto.tiers(1).tier(), v1::TIER_Q8);
  EXPECT_EQ(proto.tiers(1).k_tokens(), 5u);
  EXPECT_EQ(proto.dropped_tokens(0).first(), 3u);
  EXPECT_EQ(proto.allocator(), v1::ALLOCATOR_PDTRIM);
  ASSERT_EQ(proto.stages_size(), 1);
  EXPECT_EQ(proto.stages(0).stage(), "encode");
  EXPECT_EQ(proto.limited_by(), v1::LIMITED_BY_UNSPECIFIED);
  EXPECT_FALSE(proto.has_link_bytes_per_second());
  EXPECT_FALSE(proto.has_measured_link_bytes_per_second());
  EXPECT_FALSE(proto.has_budget_choice());
}

TEST(Report, SaysWhatLimitedItAndWhatWasChosen) {
  TransferReport report;
  report.limited_by = Limit::kDecode;
  report.limited_seconds = 0.25;
  report.measured_link = 1e6;
  report.link = 2e6;
  report.choice = BudgetChoice{0.5, 0.2, 0.37, BudgetReason::kMeetsTarget, 0.49, 2e6};
  v1::TransferReport proto;
  ReportToProto(report, &proto);
  EXPECT_EQ(proto.limited_by(), v1::LIMITED_BY_DECODE);
  EXPECT_EQ(proto.limited_seconds(), 0.25);
  EXPECT_EQ(proto.measured_link_bytes_per_second(), 1e6);
  EXPECT_EQ(proto.link_bytes_per_second(), 2e6);
  EXPECT_EQ(proto.budget_choice().target_seconds(), 0.5);
  EXPECT_EQ(proto.budget_choice().min_budget(), 0.2);
  EXPECT_EQ(proto.budget_choice().budget(), 0.37);
  EXPECT_EQ(proto.budget_choice().reason(), v1::BUDGET_REASON_MEETS_TARGET);
  EXPECT_EQ(proto.budget_choice().predicted_seconds(), 0.49);
  EXPECT_EQ(proto.budget_choice().link_bytes_per_second(), 2e6);
  report.choice = BudgetChoice{0.5, 0.2, 0.5, BudgetReason::kLinkUnknown, std::nullopt, std::nullopt};
  ReportToProto(report, &proto);
  EXPECT_EQ(proto.budget_choice().reason(), v1::BUDGET_REASON_LINK_UNKNOWN);
}

}  // namespace
}  // namespace spectrumkv
