// One look at a peer: who it is, how far away, how fast the way there is, and what time it has. Internal to
// server/stream but for the result; GrpcTransport::Probe is the way in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include "absl/status/statusor.h"
#include "server/stream/probe_result.h"

namespace spectrumkv {

// Blocks: at most timeout_ms to reach the peer, then about a second. `track`: called with the context of each call before
// it begins, and with null after it, so that another thread can cancel it; false: do not begin any more.
// Errors: CallError (dial_error.h) as of a dialler, UNAVAILABLE SHUTTING_DOWN.
absl::StatusOr<ProbeResult> ProbeOver(const std::shared_ptr<grpc::Channel>& channel, const std::string& peer,
                                      int64_t timeout_ms, const std::function<bool(grpc::ClientContext*)>& track);

}  // namespace spectrumkv
