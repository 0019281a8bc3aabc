// WorkerService: what the inference worker beside the daemon asks for. Each call checks its message (convert.h), acts
// through PoolRegistry and TransferManager, and never blocks a thread of gRPC.
#pragma once

#include <memory>

#include <grpcpp/impl/service_type.h>
#include "server/service/service_context.h"

namespace spectrumkv {

// `context` is borrowed.
std::unique_ptr<grpc::Service> NewWorkerService(const ServiceContext* context);

}  // namespace spectrumkv
