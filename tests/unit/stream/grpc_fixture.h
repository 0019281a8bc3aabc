// A server and diallers of it over the real transport.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include "server/stream/grpc_transport.h"
#include "server/stream/peer_server.h"
#include "spectrumkv/v1/peer_service.grpc.pb.h"
#include "tests/unit/stream/stream_fixtures.h"

namespace spectrumkv {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

inline int64_t MsSince(steady_clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin).count();
}

class GrpcTest : public testing::Test {
 protected:
  void StartServer(PeerServerOptions options = {}) { server_ = PeerServer::Start(options, &acceptor_).value(); }
  std::unique_ptr<GrpcTransport> NewTransport(GrpcTransportOptions options = {}) {
    return GrpcTransport::Create(options).value();
  }
  std::unique_ptr<v1::PeerService::Stub> OrdinaryClient() {
    grpc::ChannelArguments args;
    args.SetMaxReceiveMessageSize(-1);
    args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::PeerService::NewStub(
        grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), args));
  }
  SlotPool pool_{16, size_t{1} << 20};
  RecordingAcceptor acceptor_;
  std::unique_ptr<PeerServer> server_;
};

}  // namespace spectrumkv
