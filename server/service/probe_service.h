// ProbeService: hands out trials, judges what came of them, tells verdicts (server/probe).
#pragma once

#include <memory>

#include <grpcpp/impl/service_type.h>
#include "server/service/service_context.h"

namespace spectrumkv {

// `context` is borrowed; its gate is set.
std::unique_ptr<grpc::Service> NewProbeService(const ServiceContext* context);

}  // namespace spectrumkv
