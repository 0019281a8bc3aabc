#include "tests/integration/rpc_fixture.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <grpcpp/support/client_interceptor.h>
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace spectrumkv {
namespace {

class CountingInterceptor final : public grpc::experimental::Interceptor {
 public:
  CountingInterceptor(CallLedger* ledger, grpc::experimental::ClientRpcInfo* info) : ledger_(ledger), info_(info) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(grpc::experimental::InterceptionHookPoints::POST_RECV_STATUS)) {
      ledger_->Count(info_->method(), methods->GetRecvStatus()->ok());
    }
    methods->Proceed();
  }

 private:
  CallLedger* const ledger_;
  grpc::experimental::ClientRpcInfo* const info_;
};

class CountingFactory final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit CountingFactory(CallLedger* ledger) : ledger_(ledger) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo* info) override {
    return new CountingInterceptor(ledger_, info);
  }

 private:
  CallLedger* const ledger_;
};

struct Cluster {
  CallLedger ledger;
  std::unique_ptr<DaemonProcess> prefill, decode;
  std::unique_ptr<v1::WorkerService::Stub> prefill_worker, decode_worker;
  std::unique_ptr<v1::AdminService::Stub> admin;
  std::unique_ptr<v1::PeerService::Stub> decode_peer;
};
Cluster* g_cluster = nullptr;

}  // namespace

void CallLedger::Count(const std::string& method, bool ok) {
  std::lock_guard<std::mutex> lock(mutex_);
  Ends& ends = ends_[method];
  ++(ok ? ends.ok : ends.failed);
}

std::map<std::string, CallLedger::Ends> CallLedger::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ends_;
}

std::shared_ptr<grpc::Channel> CallLedger::Channel(const std::string& target) {
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<CountingFactory>(this));
  return grpc::experimental::CreateCustomChannelWithInterceptors(target, grpc::InsecureChannelCredentials(),
                                                                 grpc::ChannelArguments(), std::move(factories));
}

std::string ReasonOfRpc(const grpc::Status& status) {
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const auto& any : details.details()) {
    google::rpc::ErrorInfo info;
    if (any.UnpackTo(&info)) return info.reason();
  }
  return "";
}

v1::PoolSchema SmallPool() {
  v1::PoolSchema schema;
  schema.set_model("test-model");
  schema.set_revision("1");
  schema.set_tensor_parallel_size(1);
  const uint64_t tensor_bytes = uint64_t{kPoolBlocks} * kPoolBlockBytes;
  schema.add_segments()->mutable_daemon_owned()->set_size_bytes(2 * kPoolLayers * tensor_bytes);
  v1::LayerGroup* group = schema.add_groups();
  group->set_kind(v1::GROUP_KIND_ATTENTION);
  group->set_data_type(v1::DATA_TYPE_FLOAT16);
  group->set_heads_total(kPoolHeads);
  group->set_head_count(kPoolHeads);
  group->set_head_dim(kPoolHeadDim);
  group->set_block_tokens(kPoolBlockTokens);
  group->set_num_blocks(kPoolBlocks);
  uint64_t offset = 0;
  for (uint32_t layer = 0; layer < kPoolLayers; ++layer) {
    v1::LayerTensors* tensors = group->add_layers();
    tensors->set_layer(layer);
    for (v1::TensorView* view : {tensors->mutable_k(), tensors->mutable_v()}) {
      view->set_offset_bytes(offset);
      view->set_block_stride_bytes(kPoolBlockBytes);
      view->set_token_stride_bytes(uint64_t{kPoolHeads} * kPoolHeadDim * 2);
      view->set_head_stride_bytes(uint64_t{kPoolHeadDim} * 2);
      view->set_dim_stride_bytes(2);
      offset += tensor_bytes;
    }
  }
  return schema;
}

void RpcFixture::SetUpTestSuite() {
  g_cluster = new Cluster();
  g_cluster->prefill = DaemonProcess::Start();
  g_cluster->decode = DaemonProcess::Start();
  ASSERT_NE(g_cluster->prefill, nullptr);
  ASSERT_NE(g_cluster->decode, nullptr);
  CallLedger& ledger = g_cluster->ledger;
  g_cluster->prefill_worker = v1::WorkerService::NewStub(ledger.Channel(g_cluster->prefill->worker_target()));
  g_cluster->decode_worker = v1::WorkerService::NewStub(ledger.Channel(g_cluster->decode->worker_target()));
  g_cluster->admin = v1::AdminService::NewStub(ledger.Channel(g_cluster->decode->admin_target()));
  g_cluster->decode_peer = v1::PeerService::NewStub(ledger.Channel(g_cluster->decode->address("peer")));
}

void RpcFixture::TearDownTestSuite() {
  for (DaemonProcess* daemon : {g_cluster->prefill.get(), g_cluster->decode.get()}) {
    if (daemon == nullptr) continue;
    daemon->Signal(SIGTERM);
    // Tests leave transfers behind: the second signal (of Stop) ends the wait for them.
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(daemon->Stop(), 0) << daemon->Log();
  }
  delete g_cluster;
  g_cluster = nullptr;
}

CallLedger& RpcFixture::ledger() { return g_cluster->ledger; }
DaemonProcess& RpcFixture::prefill() { return *g_cluster->prefill; }
DaemonProcess& RpcFixture::decode() { return *g_cluster->decode; }
v1::WorkerService::Stub& RpcFixture::prefill_worker() { return *g_cluster->prefill_worker; }
v1::WorkerService::Stub& RpcFixture::decode_worker() { return *g_cluster->decode_worker; }
v1::AdminService::Stub& RpcFixture::admin() { return *g_cluster->admin; }
v1::PeerService::Stub& RpcFixture::decode_peer() { return *g_cluster->decode_peer; }

std::unique_ptr<grpc::ClientContext> RpcFixture::Context(int timeout_ms) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  return context;
}

v1::PoolRef RpcFixture::Register(v1::WorkerService::Stub& worker, const std::string& request_id) {
  v1::RegisterPoolRequest request;
  request.set_request_id(request_id);
  *request.mutable_schema() = SmallPool();
  v1::RegisterPoolResponse response;
  EXPECT_RPC_OK(worker.RegisterPool(Context().get(), request, &response));
  return response.pool();
}

std::string RpcFixture::Fill(v1::WorkerService::Stub& worker, const v1::PoolRef& pool, uint32_t seed) {
  const auto context = Context();
  v1::PutBlocksResponse response;
  const auto writer = worker.PutBlocks(context.get(), &response);
  std::string first;
  for (uint32_t block = 0; block < 3; ++block) {
    v1::PutBlocksRequest request;
    *request.mutable_pool() = pool;
    for (uint32_t layer = 0; layer < kPoolLayers; ++layer) {
      for (const v1::Plane plane : {v1::PLANE_K, v1::PLANE_V}) {
        std::string data(kPoolBlockBytes, '\0');
        for (size_t i = 0; i < kPoolBlockBytes; i += 2) {
          // Float16 of both signs around 1.
          seed = seed * 1664525 + 1013904223;
          const uint16_t word = static_cast<uint16_t>(0x3800 + (seed >> 20) % 0x800 + (seed >> 31 << 15));
          std::memcpy(data.data() + i, &word, 2);
        }
        if (first.empty()) first = data;
        v1::BlockData* out = request.add_blocks();
        out->set_layer(layer);
        out->set_plane(plane);
        out->set_block(block);
        out->set_data(std::move(data));
      }
    }
    writer->Write(request);
  }
  writer->WritesDone();
  EXPECT_RPC_OK(writer->Finish());
  EXPECT_EQ(response.blocks(), 3 * kPoolLayers * 2);
  EXPECT_EQ(response.bytes(), 3 * kPoolLayers * 2 * kPoolBlockBytes);
  return first;
}

v1::GroupBlocks RpcFixture::Blocks() {
  v1::GroupBlocks blocks;
  v1::BlockRun* run = blocks.add_runs();
  run->set_first(0);
  run->set_count(3);
  return blocks;
}

std::string RpcFixture::NewTransferId(const std::string& name) {
  static std::atomic<int> next{1};
  return name + "-" + std::to_string(next.fetch_add(1));
}

v1::ExpectRequest RpcFixture::ExpectOf(const v1::PoolRef& pool, const std::string& id) {
  v1::ExpectRequest request;
  request.set_transfer_id(id);
  *request.mutable_pool() = pool;
  request.set_token_count(kTokens);
  *request.add_blocks() = Blocks();
  return request;
}

v1::SendRequest RpcFixture::SendOf(const v1::PoolRef& pool, const std::string& id, const std::string& peer) {
  v1::SendRequest request;
  request.set_transfer_id(id);
  request.set_peer(peer);
  *request.mutable_pool() = pool;
  request.set_token_count(kTokens);
  *request.add_blocks() = Blocks();
  request.mutable_policy()->set_allocator(v1::ALLOCATOR_RAW);
  request.mutable_policy()->set_budget(1.1);
  return request;
}

v1::TransferReport RpcFixture::WaitEnd(v1::WorkerService::Stub& worker, const std::string& id) {
  v1::WatchTransferRequest request;
  request.mutable_transfer()->set_transfer_id(id);
  const auto context = Context(40000);
  const auto reader = worker.WatchTransfer(context.get(), request);
  v1::WatchTransferResponse event;
  v1::TransferReport report;
  int terminals = 0;
  while (reader->Read(&event)) {
    EXPECT_EQ(terminals, 0) << "an event after the terminal one";
    if (!event.has_terminal()) continue;
    ++terminals;
    report = event.terminal();
  }
  EXPECT_RPC_OK(reader->Finish());
  EXPECT_EQ(terminals, 1);
  return report;
}

}  // namespace spectrumkv
