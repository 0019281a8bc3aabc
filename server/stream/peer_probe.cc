#include "server/stream/peer_probe.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "server/base/status.h"
#include "server/stream/dial_error.h"
#include "server/stream/status_codec.h"
#include "spectrumkv/v1/peer_service.grpc.pb.h"

namespace spectrumkv {
namespace {

using Steady = std::chrono::steady_clock;

constexpr int kRoundTrips = 5;
// Messages grow until one takes long enough to say something.
constexpr size_t kLeastFiller = 64 << 10, kMostFiller = 1 << 20;
constexpr double kLongEnoughSeconds = 0.05;
constexpr int kMessages = 16;
constexpr double kMeasureSeconds = 1;

double SecondsOf(Steady::duration time) { return std::chrono::duration<double>(time).count(); }

double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

class Prober {
 public:
  Prober(const std::shared_ptr<grpc::Channel>& channel, const std::string& peer, int64_t timeout_ms,
         const std::function<bool(grpc::ClientContext*)>& track)
      : stub_(v1::PeerService::NewStub(channel)), peer_(peer), timeout_ms_(timeout_ms), track_(track) {}

  absl::StatusOr<ProbeResult> Run() {
    const absl::StatusOr<double> first = Call(0);
    if (!first.ok()) return first.status();
    result_.connect_seconds = result_.round_trip_seconds = *first;
    // The first one dialled: as a round trip it is too long, so any other beats it.
    for (int i = 0; i < kRoundTrips; ++i) {
      const absl::Status one = RoundTrip();
      if (!one.ok()) return one;
    }
    const absl::Status rate = MeasureRate();
    if (!rate.ok()) return rate;
    return result_;
  }

 private:
  // Seconds until the answer, which is left in response_.
  absl::StatusOr<double> Call(size_t filler_bytes) {
    v1::ProbeRequest request;
    request.set_filler(std::string(filler_bytes, '\x5a'));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms_));
    if (!track_(&context)) return Stopping();
    const auto began = Steady::now();
    const grpc::Status status = stub_->Probe(&context, request, &response_);
    const double seconds = SecondsOf(Steady::now() - began);
    track_(nullptr);
    if (!status.ok()) return CallError(peer_, FromGrpcStatus(status), !connected_);
    connected_ = true;
    result_.version = response_.version();
    result_.epoch = response_.epoch();
    return seconds;
  }

  absl::Status RoundTrip() {
    const double before = WallSeconds();
    const absl::StatusOr<double> seconds = Call(0);
    if (!seconds.ok()) return seconds.status();
    if (*seconds < result_.round_trip_seconds) {
      result_.round_trip_seconds = *seconds;
      result_.clock_error_seconds = *seconds / 2;
      result_.clock_offset_seconds = static_cast<double>(response_.unix_time_ns()) * 1e-9 - (before + *seconds / 2);
    }
    return absl::OkStatus();
  }

  // The median of the largest messages that there is time for.
  absl::Status MeasureRate() {
    const auto began = Steady::now();
    std::vector<double> rates;
    size_t bytes = kLeastFiller;
    for (int i = 0; i < kMessages && (rates.empty() || SecondsOf(Steady::now() - began) < kMeasureSeconds);) {
      const absl::StatusOr<double> seconds = Call(bytes);
      if (!seconds.ok()) return seconds.status();
      const double on_the_way = std::max(*seconds - result_.round_trip_seconds, 1e-6);
      rates.push_back(static_cast<double>(bytes) / on_the_way);
      if (bytes < kMostFiller && *seconds < kLongEnoughSeconds) {
        bytes *= 2;
        rates.clear();
        continue;
      }
      ++i;
    }
    std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2), rates.end());
    result_.link_bytes_per_second = rates[rates.size() / 2];
    return absl::OkStatus();
  }

  static absl::Status Stopping() {
    return MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "this endpoint is shutting down");
  }

  const std::unique_ptr<v1::PeerService::Stub> stub_;
  const std::string& peer_;
  const int64_t timeout_ms_;
  const std::function<bool(grpc::ClientContext*)>& track_;
  v1::ProbeResponse response_;
  ProbeResult result_;
  bool connected_ = false;
};

}  // namespace

absl::StatusOr<ProbeResult> ProbeOver(const std::shared_ptr<grpc::Channel>& channel, const std::string& peer,
                                      int64_t timeout_ms, const std::function<bool(grpc::ClientContext*)>& track) {
  return Prober(channel, peer, timeout_ms, track).Run();
}

}  // namespace spectrumkv
