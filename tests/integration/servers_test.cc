// The servers of a daemon as such: which services answer where, who may take a socket or a port, how a daemon ends.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include "spectrumkv/v1/probe_service.pb.h"
#include "tests/integration/rpc_fixture.h"

namespace spectrumkv {
namespace {

constexpr char kReflection[] = "grpc.reflection.v1alpha.ServerReflection";
constexpr char kHealth[] = "grpc.health.v1.Health";

std::vector<std::string> MethodsOf(const std::string& service) {
  if (service == kReflection) return {"/" + service + "/ServerReflectionInfo"};
  if (service == kHealth) return {"/" + service + "/Check", "/" + service + "/Watch"};
  // One message of each file, or the linker would leave the files out.
  for (const auto* message :
       {v1::SendRequest::descriptor(), v1::GetStatusRequest::descriptor(), v1::Hello::descriptor(),
        v1::StartProbeRequest::descriptor()}) {
    EXPECT_NE(message, nullptr);
  }
  std::vector<std::string> methods;
  const auto* descriptor = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
  for (int i = 0; i < descriptor->method_count(); ++i) {
    methods.push_back("/" + service + "/" + descriptor->method(i)->name());
  }
  return methods;
}

// Sends one message and closes; the code the call ends with.
grpc::StatusCode CallCode(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                          const std::string& message = "") {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(&context, method, &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto wait = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(nullptr);
  if (wait()) {
    const grpc::Slice slice(message);
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    wait();
    grpc::ByteBuffer answer;
    do {
      call->Read(&answer, nullptr);
    } while (wait());
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  return status.error_code();
}

std::shared_ptr<grpc::Channel> PlainChannel(const std::string& target) {
  // Channels of one target share connections; a daemon that was replaced must be dialled anew.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

bool IsServing(const std::string& address, const std::string& name) {
  // HealthCheckRequest {1: name}, HealthCheckResponse {1: SERVING = 1}: plain enough to write by hand.
  grpc::GenericStub stub(PlainChannel(address));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  grpc::CompletionQueue queue;
  const std::string request = std::string("\x0a") + static_cast<char>(name.size()) + name;
  const grpc::Slice slice(request);
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::ByteBuffer(&slice, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  std::vector<grpc::Slice> slices;
  if (!status.ok() || !answer.Dump(&slices).ok()) return false;
  std::string bytes;
  for (const grpc::Slice& part : slices) bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  return bytes == std::string("\x08\x01", 2);
}

bool Alive(const DaemonProcess& daemon) {
  const auto stub = v1::AdminService::NewStub(PlainChannel(daemon.admin_target()));
  const auto worker = v1::WorkerService::NewStub(PlainChannel(daemon.worker_target()));
  grpc::ClientContext context, worker_context;
  v1::GetStatusResponse status;
  v1::GetTransferRequest get;
  get.mutable_transfer()->set_transfer_id("nobody");
  v1::GetTransferResponse got;
  return stub->GetStatus(&context, {}, &status).ok() && status.epoch() == daemon.epoch() &&
         worker->GetTransfer(&worker_context, get, &got).error_code() == grpc::StatusCode::NOT_FOUND;
}

TEST(Servers, OnlyTheirOwnServicesAnswer) {
  const auto daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  const std::string worker = "spectrumkv.v1.WorkerService", admin = "spectrumkv.v1.AdminService",
                    peer = "spectrumkv.v1.PeerService", probe = "spectrumkv.v1.ProbeService";
  const struct {
    std::string name, target;
    std::set<std::string> services;
  } ports[] = {{"worker", daemon->worker_target(), {worker, probe, kHealth, kReflection}},
               {"peer", daemon->address("peer"), {peer}},
               {"health", daemon->address("health"), {kHealth}},
               {"admin", daemon->admin_target(), {admin, kReflection}}};
  int calls = 0;
  for (const auto& port : ports) {
    const auto channel = PlainChannel(port.target);
    for (const std::string& service : {worker, admin, peer, probe, std::string(kHealth), std::string(kReflection)}) {
      for (const std::string& method : MethodsOf(service)) {
        // Last of all: a drained daemon still answers, but need not be tried here.
        if (method == "/" + admin + "/Drain" && port.name == "admin") continue;
        const grpc::StatusCode code = CallCode(channel, method);
        EXPECT_EQ(code != grpc::StatusCode::UNIMPLEMENTED, port.services.count(service) > 0)
            << method << " on the " << port.name << " server answers " << code;
        ++calls;
      }
    }
  }
  EXPECT_EQ(calls, 4 * (19 + 11 + 3 + 4 + 2 + 1) - 1);
  EXPECT_TRUE(Alive(*daemon));
}

TEST(Servers, SocketModesAndDirectories) {
  const auto daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  struct stat info {};
  ASSERT_EQ(stat(daemon->address("worker_socket").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0660u);
  ASSERT_EQ(stat(daemon->address("admin_socket").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);

  const auto nested = DaemonProcess::Start({{"worker.socket", daemon->folder() + "/made/worker.sock"}});
  ASSERT_NE(nested, nullptr);
  ASSERT_EQ(stat((daemon->folder() + "/made").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0750u);
}

TEST(Servers, SecondDaemonRefusesTakenAddresses) {
  const auto first = DaemonProcess::Start();
  ASSERT_NE(first, nullptr);
  const std::map<std::string, std::string> taken = {{"worker.socket", first->address("worker_socket")},
                                                    {"admin.socket", first->address("admin_socket")},
                                                    {"peer.listen_address", first->address("peer")},
                                                    {"health.listen_address", first->address("health")},
                                                    {"metrics.listen_address", first->address("metrics")}};
  for (const auto& [key, value] : taken) {
    std::string log;
    EXPECT_EQ(DaemonProcess::StartRefused({{key, value}}, &log), 1) << key << "\n" << log;
    EXPECT_NE(log.find(value), std::string::npos) << key << ": the log does not name the address\n" << log;
    EXPECT_TRUE(Alive(*first)) << "after a second daemon with the same " << key;
  }
}

TEST(Servers, StaleSocketIsReplacedAndOtherFilesAreNot) {
  auto first = DaemonProcess::Start();
  ASSERT_NE(first, nullptr);
  const std::string socket = first->address("worker_socket");
  first->Signal(SIGKILL);
  EXPECT_EQ(first->WaitExit(10000), 128 + SIGKILL);
  EXPECT_EQ(access(socket.c_str(), F_OK), 0) << "a killed daemon leaves its socket";
  const auto second = DaemonProcess::Start({{"worker.socket", socket}});
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(Alive(*second));

  const std::string file = first->folder() + "/precious";
  std::ofstream(file) << "not a socket";
  std::string log;
  EXPECT_EQ(DaemonProcess::StartRefused({{"worker.socket", file}}, &log), 1) << log;
  EXPECT_EQ(access(file.c_str(), F_OK), 0);
}

TEST(Servers, HealthFollowsDraining) {
  const auto daemon = DaemonProcess::Start();
  ASSERT_NE(daemon, nullptr);
  const std::vector<std::string> targets = {daemon->address("health"), daemon->worker_target()};
  for (const std::string& target : targets) {
    for (const char* name : {"", "liveness", "readiness"}) EXPECT_TRUE(IsServing(target, name)) << target << " " << name;
    EXPECT_FALSE(IsServing(target, "nonsense"));
  }
  const auto admin = v1::AdminService::NewStub(PlainChannel(daemon->admin_target()));
  grpc::ClientContext context;
  v1::DrainResponse drained;
  EXPECT_RPC_OK(admin->Drain(&context, {}, &drained));
  for (const std::string& target : targets) {
    EXPECT_FALSE(IsServing(target, "")) << target;
    EXPECT_FALSE(IsServing(target, "readiness")) << target;
    EXPECT_TRUE(IsServing(target, "liveness")) << target;
  }
}

// Holds a transfer, so that draining has something to wait for.
class Signals : public RpcFixture {};

TEST_F(Signals, FirstDrainsSecondStops) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const auto daemon = DaemonProcess::Start();
    ASSERT_NE(daemon, nullptr);
    EXPECT_EQ(access((daemon->folder() + "/ready.json").c_str(), F_OK), 0);
    const auto worker = v1::WorkerService::NewStub(ledger().Channel(daemon->worker_target()));
    v1::ExpectResponse expected;
    EXPECT_RPC_OK(
        worker->Expect(Context().get(), ExpectOf(Register(*worker, "held"), NewTransferId("held")), &expected));
    daemon->Signal(signal);
    while (IsServing(daemon->address("health"), "readiness")) usleep(10000);
    EXPECT_TRUE(daemon->running()) << "it must wait for the transfer";
    EXPECT_TRUE(IsServing(daemon->address("health"), "liveness"));
    daemon->Signal(signal);
    EXPECT_EQ(daemon->WaitExit(20000), 0) << daemon->Log();
    EXPECT_NE(access((daemon->folder() + "/worker.sock").c_str(), F_OK), 0) << "the socket is left";
    EXPECT_NE(access((daemon->folder() + "/ready.json").c_str(), F_OK), 0) << "the ready file is left";
  }
}

TEST_F(Signals, DrainTimeoutEndsTheWait) {
  const auto daemon = DaemonProcess::Start({{"drain.timeout_ms", "1000"}});
  ASSERT_NE(daemon, nullptr);
  const auto worker = v1::WorkerService::NewStub(ledger().Channel(daemon->worker_target()));
  v1::ExpectResponse expected;
  EXPECT_RPC_OK(worker->Expect(Context().get(), ExpectOf(Register(*worker, "held"), NewTransferId("held")), &expected));
  EXPECT_EQ(daemon->Stop(20000), 0) << daemon->Log();
}

}  // namespace
}  // namespace spectrumkv
