// Whole daemons with pools on GPUs. The first group drives daemons whose GPUs are not there (tests/cuda/fake); the worker
// is this process, whose "GPU memory" the daemons open by its handle. The second asks a real spectrumkvd on this machine.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "tests/cuda/fake/fake_runtime.h"
#include "tests/integration/rpc_fixture.h"

namespace spectrumkv {
namespace {

using testing::FakeExport;
using testing::FakeRuntime;

constexpr size_t kPoolBytes = size_t{2} * kPoolLayers * kPoolBlocks * kPoolBlockBytes;

void SetIpc(const FakeExport& memory, const std::string& uuid, uint64_t offset, v1::MemorySegment* segment) {
  v1::CudaIpcSegment* ipc = segment->mutable_cuda_ipc();
  ipc->set_handle(memory.handle());
  ipc->set_device_uuid(uuid);
  ipc->set_offset_bytes(offset);
  ipc->set_size_bytes(kPoolBytes);
}

class GpuDaemonTest : public RpcFixture {
 protected:
  static void SetUpTestSuite() {
    setenv("SPECTRUMKVD", SPECTRUMKVD_FAKE_GPU_PATH, 1);
    RpcFixture::SetUpTestSuite();
  }
  static void TearDownTestSuite() {
    RpcFixture::TearDownTestSuite();  // exit code 0: no violation, nothing leaked
    unsetenv("SPECTRUMKVD");
  }

  static grpc::Status Try(v1::WorkerService::Stub& worker, const v1::PoolSchema& schema, v1::PoolRef* pool) {
    v1::RegisterPoolRequest request;
    request.set_request_id(NewTransferId("pool"));
    *request.mutable_schema() = schema;
    v1::RegisterPoolResponse response;
    const grpc::Status status = worker.RegisterPool(Context().get(), request, &response);
    *pool = response.pool();
    return status;
  }
  static v1::PoolRef RegisterIpc(v1::WorkerService::Stub& worker, const FakeExport& memory, int device,
                                 uint64_t offset = 0) {
    v1::PoolSchema schema = SmallPool();
    SetIpc(memory, FakeRuntime::Uuid(device), offset, schema.mutable_segments(0));
    v1::PoolRef pool;
    EXPECT_RPC_OK(Try(worker, schema, &pool));
    return pool;
  }
  static void Unregister(v1::WorkerService::Stub& worker, const v1::PoolRef& pool) {
    v1::UnregisterPoolRequest request;
    *request.mutable_pool() = pool;
    v1::UnregisterPoolResponse response;
    EXPECT_RPC_OK(worker.UnregisterPool(Context().get(), request, &response));
  }
  static v1::GetStatusResponse Status() {
    v1::GetStatusResponse status;
    EXPECT_RPC_OK(admin().GetStatus(Context().get(), v1::GetStatusRequest(), &status));
    return status;
  }
  static v1::SendRequest SendRaw(const v1::PoolRef& pool, const std::string& id) {
    v1::SendRequest send = SendOf(pool, id, decode().address("peer"));
    send.mutable_policy()->set_allocator(v1::ALLOCATOR_RAW);
    send.mutable_policy()->set_budget(1.1);
    return send;
  }
};

TEST_F(GpuDaemonTest, AWorkersGpuMemoryGoesToAnotherWorkersGpuMemory) {
  FakeExport source = FakeExport::Memory(0, kPoolBytes + 512), target = FakeExport::Memory(1, kPoolBytes);
  std::memset(source.data(), 0, source.bytes());
  std::memset(target.data(), 0, target.bytes());
  const v1::PoolRef from = RegisterIpc(prefill_worker(), source, 0, 512);
  const v1::PoolRef to = RegisterIpc(decode_worker(), target, 1);
  const std::string first = Fill(prefill_worker(), from, 7);
  EXPECT_EQ(std::memcmp(source.data() + 512, first.data(), first.size()), 0) << "PutBlocks reach the worker's memory";

  const std::string id = NewTransferId("gpu");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(to, id), &expected));
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), SendRaw(from, id), &sent));
  const v1::TransferReport report = WaitEnd(decode_worker(), id);
  EXPECT_EQ(report.state(), v1::TRANSFER_STATE_COMMITTED) << report.DebugString();
  EXPECT_EQ(report.path(), "device");
  EXPECT_EQ(report.backend(), "cuda");
  const size_t token = kPoolBlockBytes / kPoolBlockTokens;
  for (uint32_t tensor = 0; tensor < 2 * kPoolLayers; ++tensor) {
    const size_t at = tensor * kPoolBlocks * kPoolBlockBytes;
    EXPECT_EQ(std::memcmp(target.data() + at, source.data() + 512 + at, kTokens * token), 0) << "tensor " << tensor;
  }
  Unregister(prefill_worker(), from);
  Unregister(decode_worker(), to);
}

TEST_F(GpuDaemonTest, NothingIsReadBeforeTheEventThatTheWorkerNamed) {
  FakeExport source = FakeExport::Memory(0, kPoolBytes), written = FakeExport::Event(0);
  std::memset(source.data(), 0, source.bytes());
  const v1::PoolRef from = RegisterIpc(prefill_worker(), source, 0);
  v1::PoolSchema owned = SmallPool();
  owned.mutable_segments(0)->mutable_daemon_owned()->set_device(FakeRuntime::Uuid(1));
  v1::PoolRef to;
  EXPECT_RPC_OK(Try(decode_worker(), owned, &to));

  const std::string id = NewTransferId("event");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(to, id), &expected));
  v1::SendRequest send = SendRaw(from, id);
  send.set_written_event(written.handle());
  v1::SendResponse sent;
  EXPECT_RPC_OK(prefill_worker().Send(Context().get(), send, &sent));
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  v1::GetTransferRequest get;
  get.mutable_transfer()->set_transfer_id(id);
  v1::GetTransferResponse got;
  EXPECT_RPC_OK(prefill_worker().GetTransfer(Context().get(), get, &got));
  EXPECT_EQ(got.report().chunks(), 0u) << "a chunk was coded before the event";
  std::memset(source.data(), 0x3C, source.bytes());  // the writes that the event stands behind
  written.Reach();
  const v1::TransferReport report = WaitEnd(decode_worker(), id);
  EXPECT_EQ(report.state(), v1::TRANSFER_STATE_COMMITTED) << report.DebugString();
  v1::GetBlocksRequest read;
  *read.mutable_pool() = to;
  read.add_runs()->set_count(1);
  const auto context = Context();
  const auto reader = decode_worker().GetBlocks(context.get(), read);
  v1::GetBlocksResponse blocks;
  int seen = 0;
  while (reader->Read(&blocks)) {
    for (const v1::BlockData& block : blocks.blocks()) {
      EXPECT_EQ(block.data(), std::string(kPoolBlockBytes, '\x3C'));
      ++seen;
    }
  }
  EXPECT_RPC_OK(reader->Finish());
  EXPECT_EQ(seen, static_cast<int>(2 * kPoolLayers));
  Unregister(prefill_worker(), from);
  Unregister(decode_worker(), to);
}

// Queries of four heads, at the last two positions, that favour the keys of some tokens.
v1::RecentQueries QueriesOf(uint32_t layer) {
  constexpr uint32_t kQueryHeads = 4;
  v1::RecentQueries queries;
  queries.set_data_type(v1::DATA_TYPE_FLOAT32);
  queries.add_positions(kTokens - 2);
  queries.add_positions(kTokens - 1);
  std::vector<float> values(2 * kQueryHeads * kPoolHeadDim);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 37 % 19) / 8.0f - 1.0f;
  v1::LayerQueries* of_layer = queries.add_layers();
  of_layer->set_layer(layer);
  of_layer->set_query_heads(kQueryHeads);
  of_layer->set_queries(std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
  return queries;
}

// Plan, Send and Publish with Advance: a pool on a GPU is planned and sent as the same values in host memory are.
TEST_F(GpuDaemonTest, RecentQueriesAttendToKeysOnTheGpu) {
  FakeExport memory = FakeExport::Memory(0, kPoolBytes);
  std::memset(memory.data(), 0, memory.bytes());
  v1::PlanResponse plans[2];
  v1::TransferReport pushed[2], pulled[2];
  for (int on_gpu = 0; on_gpu < 2; ++on_gpu) {
    const v1::PoolRef from = on_gpu != 0 ? RegisterIpc(prefill_worker(), memory, 0) : Register(prefill_worker(), "attended");
    const v1::PoolRef to = Register(decode_worker(), "attends-" + std::to_string(on_gpu));
    Fill(prefill_worker(), from, 7);
    const std::string id = NewTransferId("attend");
    v1::SendRequest send = SendOf(from, id, decode().address("peer"));
    send.mutable_policy()->set_budget(0.5);
    send.mutable_policy()->set_allocator(v1::ALLOCATOR_GREEDY);
    *send.mutable_policy()->mutable_importance()->mutable_queries() = QueriesOf(1);
    v1::PlanRequest plan;
    *plan.mutable_pool() = from;
    plan.set_token_count(kTokens);
    *plan.mutable_blocks() = send.blocks();
    *plan.mutable_policy() = send.policy();
    EXPECT_RPC_OK(prefill_worker().Plan(Context().get(), plan, &plans[on_gpu]));
    v1::ExpectResponse expected;
    EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(to, id), &expected));
    v1::SendResponse sent;
    EXPECT_RPC_OK(prefill_worker().Send(Context().get(), send, &sent));
    EXPECT_EQ(WaitEnd(decode_worker(), id).state(), v1::TRANSFER_STATE_COMMITTED);
    pushed[on_gpu] = WaitEnd(prefill_worker(), id);

    v1::PublishRequest publish;
    publish.set_transfer_id(NewTransferId("attend"));
    *publish.mutable_pool() = from;
    publish.set_token_count(kTokens);
    *publish.mutable_blocks() = send.blocks();
    publish.set_layerwise(true);
    publish.mutable_policy()->set_budget(0.5);
    publish.mutable_policy()->set_allocator(v1::ALLOCATOR_GREEDY);
    publish.mutable_policy()->mutable_importance()->set_source(v1::IMPORTANCE_SOURCE_RECENT_QUERIES);
    v1::PublishResponse published;
    EXPECT_RPC_OK(prefill_worker().Publish(Context().get(), publish, &published));
    v1::FetchRequest fetch;
    fetch.set_transfer_id(publish.transfer_id());
    fetch.set_peer(prefill().address("peer"));
    *fetch.mutable_pool() = to;
    fetch.set_token_count(kTokens);
    *fetch.mutable_blocks() = send.blocks();
    v1::FetchResponse fetched;
    EXPECT_RPC_OK(decode_worker().Fetch(Context().get(), fetch, &fetched));
    for (uint32_t layer = 0; layer < kPoolLayers; ++layer) {
      v1::AdvanceRequest advance;
      advance.set_transfer_id(publish.transfer_id());
      advance.set_layers(layer + 1);
      advance.set_tokens(kTokens);
      *advance.mutable_queries() = QueriesOf(layer);
      v1::AdvanceResponse advanced;
      EXPECT_RPC_OK(prefill_worker().Advance(Context().get(), advance, &advanced));
    }
    EXPECT_EQ(WaitEnd(decode_worker(), publish.transfer_id()).state(), v1::TRANSFER_STATE_COMMITTED);
    pulled[on_gpu] = WaitEnd(prefill_worker(), publish.transfer_id());
    Unregister(prefill_worker(), from);
    Unregister(decode_worker(), to);
  }
  EXPECT_EQ(plans[0].SerializeAsString(), plans[1].SerializeAsString());
  for (const auto* reports : {pushed, pulled}) {
    EXPECT_EQ(reports[1].path(), "device");
    EXPECT_EQ(reports[1].importance(), v1::IMPORTANCE_SOURCE_RECENT_QUERIES);
    EXPECT_EQ(reports[0].wire_bytes(), reports[1].wire_bytes());
    ASSERT_EQ(reports[0].tiers_size(), reports[1].tiers_size());
    for (int i = 0; i < reports[0].tiers_size(); ++i) {
      EXPECT_EQ(reports[0].tiers(i).SerializeAsString(), reports[1].tiers(i).SerializeAsString());
    }
  }
}

// What the daemon takes of a GPU by being there: in the status, in spectrumkvctl and in the metrics. A daemon of its own,
// which has used no GPU yet.
TEST_F(GpuDaemonTest, WhatTheContextTakesIsTold) {
  constexpr uint64_t kContext = uint64_t{300} << 20;  // FakeOptions
  const auto daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  const auto channel = grpc::CreateChannel(daemon->admin_target(), grpc::InsecureChannelCredentials());
  const auto admins = v1::AdminService::NewStub(channel);
  const auto ask = [&] {
    v1::GetStatusResponse status;
    EXPECT_RPC_OK(admins->GetStatus(Context().get(), v1::GetStatusRequest(), &status));
    return status;
  };
  const auto ctl = [&] {
    const std::string command = SPECTRUMKVCTL_PATH " status --admin-socket " + daemon->address("admin_socket") +
                                " --worker-socket " + daemon->address("worker_socket");
    FILE* const pipe = popen(command.c_str(), "r");
    std::string text;
    for (char line[1024]; std::fgets(line, sizeof(line), pipe) != nullptr;) text += line;
    EXPECT_EQ(pclose(pipe), 0) << text;
    return text;
  };
  const v1::GetStatusResponse idle = ask();
  for (const v1::DeviceUsage& device : idle.devices()) {
    EXPECT_TRUE(device.has_context_bytes());
    EXPECT_EQ(device.context_bytes(), 0u);
  }
  EXPECT_NE(ctl().find(FakeRuntime::Uuid(1) + " fake device 1: no context, 0 B of pools"), std::string::npos) << ctl();

  const auto worker =
      v1::WorkerService::NewStub(grpc::CreateChannel(daemon->worker_target(), grpc::InsecureChannelCredentials()));
  FakeExport memory = FakeExport::Memory(1, kPoolBytes);
  RegisterIpc(*worker, memory, 1);
  EXPECT_EQ(ask().devices(0).context_bytes(), 0u) << "a pool on one GPU costs nothing on another";
  EXPECT_EQ(ask().devices(1).context_bytes(), kContext);
  EXPECT_NE(ctl().find(FakeRuntime::Uuid(1) + " fake device 1: context 300.0 MiB"), std::string::npos) << ctl();
  std::string metrics;
  const std::string series = "spectrumkv_device_bytes{use=\"context\"} 314572800\n";
  for (int i = 0; i < 100 && metrics.find(series) == std::string::npos; ++i) {  // read once a second
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    v1::GetMetricsResponse response;
    EXPECT_RPC_OK(admins->GetMetrics(Context().get(), v1::GetMetricsRequest(), &response));
    metrics = response.text();
  }
  EXPECT_NE(metrics.find(series), std::string::npos) << metrics;
  EXPECT_EQ(daemon->Stop(), 0);
}

TEST_F(GpuDaemonTest, AnAllocationIsOpenedOnceAndClosedWithItsLastPool) {
  FakeExport memory = FakeExport::Memory(1, 2 * kPoolBytes);
  const v1::PoolRef first = RegisterIpc(decode_worker(), memory, 1);
  const v1::PoolRef second = RegisterIpc(decode_worker(), memory, 1, kPoolBytes);
  EXPECT_EQ(Status().devices(1).imports(), 1u);
  Unregister(decode_worker(), first);
  EXPECT_EQ(Status().devices(1).imports(), 1u);
  Unregister(decode_worker(), second);
  EXPECT_EQ(Status().devices(1).imports(), 0u);
  EXPECT_EQ(Status().devices_size(), 2);
  EXPECT_EQ(Status().devices(0).uuid(), FakeRuntime::Uuid(0));
  EXPECT_EQ(Status().no_device_reason(), "");
}

// The end of its hold stream is how the daemon learns that a worker has died.
TEST_F(GpuDaemonTest, AWorkerThatDiesLetsGoOfItsGpuMemory) {
  FakeExport memory = FakeExport::Memory(1, kPoolBytes);
  const v1::PoolRef pool = RegisterIpc(decode_worker(), memory, 1);
  const auto context = Context();
  const auto stream = decode_worker().HoldPool(context.get());
  v1::HoldPoolRequest ping;
  *ping.mutable_pool() = pool;
  v1::HoldPoolResponse answer;
  ASSERT_TRUE(stream->Write(ping));
  ASSERT_TRUE(stream->Read(&answer));
  EXPECT_EQ(Status().devices(1).imports(), 1u);
  context->TryCancel();
  stream->Finish();
  for (int i = 0; i < 1000 && Status().devices(1).imports() != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(Status().devices(1).imports(), 0u);
  // It comes back: with memory of its own, under a handle of its own. What it had before opens nothing.
  FakeExport again = FakeExport::Memory(1, kPoolBytes);
  memory.Die();
  const v1::PoolRef restarted = RegisterIpc(decode_worker(), again, 1);
  EXPECT_EQ(Status().devices(1).imports(), 1u);
  Unregister(decode_worker(), restarted);
  EXPECT_EQ(Status().devices(1).imports(), 0u);
}

// A daemon that may not lock its staging, and must not copy once more: it refuses GPU pools of either kind, and says why.
TEST_F(GpuDaemonTest, WithoutTheHostFallbackPoolsThatWouldNeedItAreRefused) {
  setenv("SPECTRUMKV_FAKE_GPU_FAIL", "Pin:2:always", 1);
  for (const bool allowed : {true, false}) {
    const auto daemon = DaemonProcess::Start({{"memory.allow_host_fallback", allowed ? "true" : "false"}});
    ASSERT_NE(daemon, nullptr);
    const auto worker =
        v1::WorkerService::NewStub(grpc::CreateChannel(daemon->worker_target(), grpc::InsecureChannelCredentials()));
    FakeExport memory = FakeExport::Memory(0, kPoolBytes);
    v1::PoolSchema imported = SmallPool(), owned = SmallPool();
    SetIpc(memory, FakeRuntime::Uuid(0), 0, imported.mutable_segments(0));
    owned.mutable_segments(0)->mutable_daemon_owned()->set_device(FakeRuntime::Uuid(0));
    for (const v1::PoolSchema& schema : {imported, owned}) {
      v1::PoolRef pool;
      const grpc::Status status = Try(*worker, schema, &pool);
      EXPECT_EQ(ReasonOfRpc(status), allowed ? "" : "HOST_FALLBACK_FORBIDDEN") << status.error_message();
    }
    EXPECT_EQ(daemon->Stop(), 0);
  }
  unsetenv("SPECTRUMKV_FAKE_GPU_FAIL");
}

// Whatever the runtime answers, the worker is told which it was, the daemon lives on and the next pool is taken; until an
// error that ends the device: then GPU pools are refused for good, and those in host memory are served as before.
TEST_F(GpuDaemonTest, EveryErrorOfTheRuntimeIsToldAndTheDaemonLivesOn) {
  const std::vector<std::pair<int, std::string>> errors = {
      {gpu::kInvalidValue, "DEVICE_ERROR"},       {gpu::kOutOfMemory, "OUT_OF_DEVICE_MEMORY"},
      {gpu::kInitializationError, "DEVICE_ERROR"}, {gpu::kInsufficientDriver, "NO_DRIVER"},
      {gpu::kDevicesUnavailable, "DEVICE_BUSY"},   {gpu::kNoDevice, "NO_DEVICE"},
      {gpu::kInvalidDevice, "DEVICE_ERROR"},       {gpu::kContextUninitialized, "DEVICE_ERROR"},
      {gpu::kMapFailed, "DEVICE_ERROR"},           {gpu::kNoKernelImage, "DEVICE_TOO_OLD"},
      {gpu::kInvalidHandle, "DEVICE_ERROR"},       {gpu::kNotReady, "DEVICE_ERROR"},
      {gpu::kTooManyPeers, "DEVICE_ERROR"},        {gpu::kNotPermitted, "DEVICE_ERROR"},
      {gpu::kNotSupported, "DEVICE_ERROR"},        {gpu::kSystemNotReady, "DEVICE_BUSY"},
      {gpu::kDriverMismatch, "DRIVER_TOO_OLD"},    {gpu::kDriverTooOld, "DRIVER_TOO_OLD"},
      {gpu::kUnknownError, "DEVICE_ERROR"},        {gpu::kWithoutCuda, "CUDA_NOT_AVAILABLE"}};
  for (const int last : {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}) {
    std::string failures;
    const bool all = last == gpu::kIllegalAddress;  // before one of them
    for (const auto& [error, reason] : errors) failures += all ? "Allocate:" + std::to_string(error) + " " : "";
    setenv("SPECTRUMKV_FAKE_GPU_FAIL", (failures + "Allocate:" + std::to_string(last)).c_str(), 1);
    const auto daemon = DaemonProcess::Start();
    ASSERT_NE(daemon, nullptr);
    const auto worker =
        v1::WorkerService::NewStub(grpc::CreateChannel(daemon->worker_target(), grpc::InsecureChannelCredentials()));
    v1::PoolSchema owned = SmallPool();
    owned.mutable_segments(0)->mutable_daemon_owned()->set_device(FakeRuntime::Uuid(0));
    v1::PoolRef pool;
    for (const auto& [error, reason] : errors) {
      if (!all) break;
      const grpc::Status status = Try(*worker, owned, &pool);
      EXPECT_EQ(ReasonOfRpc(status), reason) << error << ": " << status.error_message();
      EXPECT_NE(status.error_message().find("(" + std::to_string(error) + ")"), std::string::npos);
    }
    for (int i = 0; i < 2; ++i) EXPECT_REFUSED(Try(*worker, owned, &pool), INTERNAL, "DEVICE_FAILED");
    EXPECT_RPC_OK(Try(*worker, SmallPool(), &pool));
    EXPECT_EQ(daemon->Stop(), 0);
  }
  unsetenv("SPECTRUMKV_FAKE_GPU_FAIL");
}

// A kernel that fails when it runs: both sides learn it, and the status names the GPU.
TEST_F(GpuDaemonTest, AKernelThatFailsEndsTheTransferOnBothSides) {
  setenv("SPECTRUMKV_FAKE_GPU_FAIL", "Encode:719:late", 1);
  const auto daemon = DaemonProcess::Start();
  unsetenv("SPECTRUMKV_FAKE_GPU_FAIL");
  ASSERT_NE(daemon, nullptr);
  const auto worker =
      v1::WorkerService::NewStub(grpc::CreateChannel(daemon->worker_target(), grpc::InsecureChannelCredentials()));
  v1::PoolSchema owned = SmallPool();
  owned.mutable_segments(0)->mutable_daemon_owned()->set_device(FakeRuntime::Uuid(1));
  v1::PoolRef from;
  EXPECT_RPC_OK(Try(*worker, owned, &from));
  Fill(*worker, from, 3);
  const v1::PoolRef to = Register(decode_worker(), "fails");
  const std::string id = NewTransferId("fails");
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(decode_worker().Expect(Context().get(), ExpectOf(to, id), &expected));
  v1::SendResponse sent;
  EXPECT_RPC_OK(worker->Send(Context().get(), SendRaw(from, id), &sent));
  const v1::TransferReport sender = WaitEnd(*worker, id), receiver = WaitEnd(decode_worker(), id);
  EXPECT_EQ(sender.state(), v1::TRANSFER_STATE_FAILED) << sender.DebugString();
  EXPECT_EQ(sender.reason(), "DEVICE_FAILED") << sender.DebugString();
  EXPECT_EQ(receiver.state(), v1::TRANSFER_STATE_FAILED);
  EXPECT_EQ(receiver.layers_ready(), 0u);
  const auto admins =
      v1::AdminService::NewStub(grpc::CreateChannel(daemon->admin_target(), grpc::InsecureChannelCredentials()));
  v1::GetStatusResponse status;
  EXPECT_RPC_OK(admins->GetStatus(Context().get(), v1::GetStatusRequest(), &status));
  EXPECT_EQ(status.devices(0).failure(), "");
  EXPECT_NE(status.devices(1).failure().find("(719)"), std::string::npos) << status.devices(1).failure();
  Unregister(decode_worker(), to);
  EXPECT_EQ(daemon->Stop(), 0);
}

TEST_F(GpuDaemonTest, HandlesThatCannotBeUsedAreRefusedWithTheCause) {
  FakeExport memory = FakeExport::Memory(1, kPoolBytes), dead = FakeExport::Memory(1, kPoolBytes);
  dead.Die();
  v1::PoolRef pool;
  const auto with = [&](const std::function<void(v1::CudaIpcSegment*)>& change) {
    v1::PoolSchema schema = SmallPool();
    SetIpc(memory, FakeRuntime::Uuid(1), 0, schema.mutable_segments(0));
    change(schema.mutable_segments(0)->mutable_cuda_ipc());
    return Try(decode_worker(), schema, &pool);
  };
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_handle(dead.handle()); }), FAILED_PRECONDITION, "IPC_HANDLE_REFUSED");
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_device_uuid(FakeRuntime::Uuid(0)); }), FAILED_PRECONDITION,
                 "IPC_HANDLE_REFUSED");  // of another device
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_device_uuid("GPU-00000000-0000-0000-0000-000000000000"); }), NOT_FOUND,
                 "UNKNOWN_DEVICE");
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_device_uuid("MIG-00000000-0000-0000-0000-000000000000"); }), NOT_FOUND,
                 "UNKNOWN_DEVICE");
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_handle("short"); }), INVALID_ARGUMENT, "INVALID_IPC_HANDLE");
  EXPECT_REFUSED(with([&](auto* ipc) { ipc->set_offset_bytes(512); }), INVALID_ARGUMENT, "SEGMENT_TOO_SHORT");
  EXPECT_EQ(Status().devices(1).imports(), 0u);

  // An event for a source in host memory, and one that nobody has.
  const v1::PoolRef host = Register(prefill_worker(), "host");
  v1::SendRequest send = SendRaw(host, NewTransferId("event-host"));
  send.set_written_event(std::string(64, 'x'));
  v1::SendResponse sent;
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), send, &sent), INVALID_ARGUMENT, "NOT_ON_DEVICE");
  FakeExport other = FakeExport::Memory(0, kPoolBytes);
  send = SendRaw(RegisterIpc(prefill_worker(), other, 0), NewTransferId("event-unknown"));
  send.set_written_event(std::string(64, 'x'));
  EXPECT_REFUSED(prefill_worker().Send(Context().get(), send, &sent), FAILED_PRECONDITION, "IPC_HANDLE_REFUSED");
}

// The one binary on this machine: it starts with or without a GPU, says which, and codes on the CPU.
TEST(RealDaemonTest, SaysWhetherThereIsAGpuAndServesHostPools) {
  unsetenv("SPECTRUMKVD");
  const auto daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  const auto channel = grpc::CreateChannel(daemon->admin_target(), grpc::InsecureChannelCredentials());
  v1::GetStatusResponse status;
  grpc::ClientContext context;
  EXPECT_RPC_OK(v1::AdminService::NewStub(channel)->GetStatus(&context, v1::GetStatusRequest(), &status));
  EXPECT_EQ(status.devices_size() == 0, !status.no_device_reason().empty());
  std::printf("GPUs: %d %s; codec backend %s\n", status.devices_size(), status.no_device_reason().c_str(),
              status.backend().c_str());
  const auto worker =
      v1::WorkerService::NewStub(grpc::CreateChannel(daemon->worker_target(), grpc::InsecureChannelCredentials()));
  v1::RegisterPoolRequest request;
  request.set_request_id("host");
  *request.mutable_schema() = SmallPool();
  v1::RegisterPoolResponse response;
  grpc::ClientContext host_context, gpu_context;
  EXPECT_RPC_OK(worker->RegisterPool(&host_context, request, &response));
  request.set_request_id("gpu");
  request.mutable_schema()->mutable_segments(0)->mutable_daemon_owned()->set_device(
      "GPU-00000000-0000-0000-0000-000000000000");
  const std::string reason = ReasonOfRpc(worker->RegisterPool(&gpu_context, request, &response));
  const std::set<std::string> causes = {"CUDA_NOT_AVAILABLE", "NO_DRIVER", "NO_DEVICE", "UNKNOWN_DEVICE"};
  EXPECT_EQ(causes.count(reason), 1u) << reason;
  EXPECT_EQ(daemon->Stop(), 0);
}

}  // namespace
}  // namespace spectrumkv
