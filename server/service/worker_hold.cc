// HoldPool: the lease of a pool, tied to a stream. No thread waits: pings renew, the end of the stream lets go.
#include <memory>
#include <string>
#include <utility>

#include "server/service/check.h"
#include "server/service/stream_writer.h"
#include "server/service/worker_calls.h"

namespace spectrumkv {
namespace {

using HoldBase = grpc::ServerBidiReactor<v1::HoldPoolRequest, v1::HoldPoolResponse>;

class HoldReactor final : public StreamWriter<HoldBase, v1::HoldPoolResponse> {
 public:
  HoldReactor(const ServiceContext* context, const Caller& caller) : context_(context), caller_(caller) {}

  static HoldReactor* Begin(const ServiceContext* context, const Caller& caller) {
    auto reactor = std::make_shared<HoldReactor>(context, caller);
    reactor->self_ = reactor;
    reactor->StartRead(&reactor->request_);
    return reactor.get();
  }

  void OnReadDone(bool ok) override {
    // Not ok: the worker has closed its half, or is gone; either way it holds the pool no more.
    const absl::Status status = ok ? OnPing() : absl::OkStatus();
    if (!ok || !status.ok()) return LetGoAndEnd(status);
    StartRead(&request_);
    Pump();
  }

  void OnDone() override { const std::shared_ptr<HoldReactor> last = std::move(self_); }

  void OnEvent(const std::string& event) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // A draining daemon still serves what the pool holds; after any other event there is no pool, and the worker must
      // hear of it even where it has not read DRAINING yet.
      if (!ending_locked()) event_ = event;
      if (event != "DRAINING") EndLocked(grpc::Status::OK);
    }
    Pump();
  }

 protected:
  bool NextLocked(v1::HoldPoolResponse* next) override {
    if (!answer_ && event_.empty()) return false;
    next->set_lease_ttl_ms(static_cast<uint64_t>(ttl_ms_));
    next->set_event(event_);
    answer_ = false;
    event_.clear();
    return true;
  }

 private:
  // The last hold of a pool has it unmapped, which takes long for much memory. In this order: a worker that has read the
  // stream's status may count on it. Every stream comes here: a read is under way until one fails.
  void LetGoAndEnd(const absl::Status& status) {
    context_->calls->Post([self = self_, status] {
      if (self->hold_id_ != 0) self->context_->pools->CloseHold(self->pool_id_, std::exchange(self->hold_id_, 0));
      self->End(status);
    });
  }

  absl::Status OnPing() {
    const v1::PoolRef& pool = request_.pool();
    if (hold_id_ == 0) {
      absl::Status status = CheckPoolRef(pool);
      if (!status.ok()) return status;
      pool_id_ = pool.pool_id();
      epoch_ = pool.epoch();
      // Told elsewhere: the registry may hold its own locks, and the stream may have gone by then.
      const auto on_event = [context = context_, weak = std::weak_ptr<HoldReactor>(self_)](const std::string& event) {
        context->calls->Post([weak, event] {
          if (const auto reactor = weak.lock()) reactor->OnEvent(event);
        });
      };
      auto hold = context_->pools->OpenHold(caller_, pool_id_, epoch_, on_event);
      if (!hold.ok()) return hold.status();
      hold_id_ = *hold;
    } else if (!pool.pool_id().empty() && (pool.pool_id() != pool_id_ || pool.epoch() != epoch_)) {
      return Invalid("INVALID_POOL_REF", "pool", "is not the one this stream holds");
    }
    const auto ttl_ms = context_->pools->Renew(caller_, pool_id_, epoch_);
    if (!ttl_ms.ok()) return ttl_ms.status();
    std::lock_guard<std::mutex> lock(mutex_);
    ttl_ms_ = *ttl_ms;
    answer_ = true;
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!ending_locked()) EndLocked(EndOf(*context_, MetricStage::kQueue, status));
    }
    Pump();
  }

  const ServiceContext* const context_;
  const Caller caller_;
  std::shared_ptr<HoldReactor> self_;
  v1::HoldPoolRequest request_;
  // Of the reading side.
  std::string pool_id_;
  uint64_t epoch_ = 0;
  uint64_t hold_id_ = 0;
  // Under mutex_. Answers to several pings become one where the worker reads slowly.
  int64_t ttl_ms_ = 0;
  bool answer_ = false;
  std::string event_;
};

}  // namespace

HoldBase* HoldPool(const ServiceContext* context, CallContext* call) {
  return HoldReactor::Begin(context, CallerOf(*context, *call));
}

}  // namespace spectrumkv
