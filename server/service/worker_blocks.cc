// PutBlocks and GetBlocks: one message at a time in memory, copies on context->calls.
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "server/service/check.h"
#include "server/service/worker_calls.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kMessageOverheadBytes = 4096;

class PutReactor final : public grpc::ServerReadReactor<v1::PutBlocksRequest> {
 public:
  PutReactor(const ServiceContext* context, CallContext* call, v1::PutBlocksResponse* response)
      : context_(context), call_(call), caller_(CallerOf(*context, *call)), response_(response) {}
  void Begin() { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      absl::Status status;
      if (call_->IsCancelled()) {
        status = absl::CancelledError("the client is gone");
      } else if (pool_.pool_id().empty()) {
        status = CheckPoolRef(pool_);
      }
      Finish(EndOf(*context_, MetricStage::kQueue, status));
      return;
    }
    context_->calls->Post([this] {
      absl::Status status;
      {
        // One message after the other, which gRPC sees to; the lock says so to tools that cannot look into gRPC.
        std::lock_guard<std::mutex> turn(turn_);
        status = Put();
      }
      if (status.ok()) {
        StartRead(&request_);
      } else {
        Finish(EndOf(*context_, MetricStage::kQueue, status));
      }
    });
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Put() {
    if (pool_.pool_id().empty()) {
      const absl::Status status = CheckPoolRef(request_.pool());
      if (!status.ok()) return status;
      pool_ = request_.pool();
      // Also for a stream that brings no block.
      const auto schema = context_->pools->SchemaOf(caller_, pool_.pool_id(), pool_.epoch());
      if (!schema.ok()) return schema.status();
    } else if (!request_.pool().pool_id().empty() && request_.pool().pool_id() != pool_.pool_id()) {
      return Invalid("INVALID_POOL_REF", "pool", "is not that of the first message");
    }
    for (const v1::BlockData& block : request_.blocks()) {
      const auto plane = PlaneFromProto(block.plane());
      if (!plane.ok()) return plane.status();
      const absl::Status status = context_->pools->PutBlock(caller_, pool_.pool_id(), pool_.epoch(), block.group(),
                                                            block.layer(), *plane, block.block(), block.data());
      if (!status.ok()) return status;
      response_->set_blocks(response_->blocks() + 1);
      response_->set_bytes(response_->bytes() + block.data().size());
    }
    return absl::OkStatus();
  }

  const ServiceContext* const context_;
  CallContext* const call_;
  const Caller caller_;
  v1::PutBlocksResponse* const response_;
  v1::PutBlocksRequest request_;
  std::mutex turn_;
  v1::PoolRef pool_;
};

// Walks layer by layer, K before V, run by run, without listing the blocks.
class GetReactor final : public grpc::ServerWriteReactor<v1::GetBlocksResponse> {
 public:
  GetReactor(const ServiceContext* context, const Caller& caller, const v1::GetBlocksRequest* request)
      : context_(context), caller_(caller), request_(request) {}
  void Begin() {
    context_->calls->Post([this] {
      absl::Status status;
      {
        std::lock_guard<std::mutex> lock(*turn_);
        status = Open();
      }
      if (status.ok()) {
        Continue();
      } else {
        Finish(EndOf(*context_, MetricStage::kQueue, status));
      }
    });
  }

  void OnWriteDone(bool ok) override {
    if (!ok || cancelled_.load()) {
      Finish(EndOf(*context_, MetricStage::kQueue, absl::CancelledError("the client is gone")));
    } else {
      context_->calls->Post([this] { Continue(); });
    }
  }
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { delete this; }

 private:
  struct Step {
    uint32_t layer = 0;
    PlaneId plane = PlaneId::kK;
  };

  absl::Status Open() {
    const v1::PoolRef& pool = request_->pool();
    absl::Status status = CheckPoolRef(pool);
    if (!status.ok()) return status;
    const auto schema = context_->pools->SchemaOf(caller_, pool.pool_id(), pool.epoch());
    if (!schema.ok()) return schema.status();
    if (request_->group() >= schema->groups.size()) {
      return Invalid(
          "INVALID_BLOCKS", "group",
          "is " + std::to_string(request_->group()) + ", the pool has " + std::to_string(schema->groups.size()));
    }
    const GroupSchema& group = schema->groups[request_->group()];
    block_bytes_ = uint64_t{group.block_tokens} * group.head_count * group.head_dim * SizeOf(group.dtype);
    if (block_bytes_ > kMaxWorkerMessageBytes - kMessageOverheadBytes) {
      return Invalid("BLOCK_TOO_LARGE", "group",
                     "has blocks of " + std::to_string(block_bytes_) + " bytes; one message carries at most " +
                         std::to_string(kMaxWorkerMessageBytes - kMessageOverheadBytes));
    }
    auto runs = RunsFromProto(request_->runs(), "runs");
    if (!runs.ok()) return runs.status();
    runs_ = *std::move(runs);
    return ListSteps(group);
  }

  absl::Status ListSteps(const GroupSchema& group) {
    if (request_->layers_size() > kMaxLayers) {
      return Invalid("OUT_OF_RANGE", "layers", "are " + std::to_string(request_->layers_size()));
    }
    const auto add = [this](const LayerSchema& layer) {
      steps_.push_back({layer.layer, PlaneId::kK});
      if (layer.v.has_value()) steps_.push_back({layer.layer, PlaneId::kV});
    };
    if (request_->layers_size() == 0) {
      for (const LayerSchema& layer : group.layers) add(layer);
    }
    for (const uint32_t wanted : request_->layers()) {
      bool found = false;
      for (const LayerSchema& layer : group.layers) {
        if (layer.layer != wanted) continue;
        add(layer);
        found = true;
      }
      if (!found) return Invalid("INVALID_BLOCKS", "layers", "holds " + std::to_string(wanted) + ", not in this group");
    }
    return absl::OkStatus();
  }

  void Continue() {
    const std::shared_ptr<std::mutex> turn = turn_;  // the stream may be gone before it is let go
    std::lock_guard<std::mutex> lock(*turn);
    response_.Clear();
    const absl::Status status = FillMessage();
    if (status.ok() && response_.blocks_size() > 0) {
      StartWrite(&response_);
    } else {
      Finish(EndOf(*context_, MetricStage::kQueue, status));
    }
  }

  absl::Status FillMessage() {
    uint64_t bytes = 0;
    while (step_ < steps_.size() && run_ < runs_.size()) {
      if (bytes > 0 && bytes + block_bytes_ > kBlockMessageBytes) break;
      const uint64_t block = runs_[run_].first + offset_;
      auto data = context_->pools->GetBlock(caller_, request_->pool().pool_id(), request_->pool().epoch(), request_->group(),
                                            steps_[step_].layer, steps_[step_].plane, block);
      if (!data.ok()) return data.status();
      bytes += data->size();
      v1::BlockData* out = response_.add_blocks();
      out->set_group(request_->group());
      out->set_layer(steps_[step_].layer);
      out->set_plane(steps_[step_].plane == PlaneId::kK ? v1::PLANE_K : v1::PLANE_V);
      out->set_block(block);
      out->set_data(*std::move(data));
      Advance();
    }
    return absl::OkStatus();
  }

  void Advance() {
    if (++offset_ < runs_[run_].count) return;
    offset_ = 0;
    if (++run_ < runs_.size()) return;
    run_ = 0;
    ++step_;
  }

  const ServiceContext* const context_;
  const Caller caller_;
  const std::shared_ptr<std::mutex> turn_ = std::make_shared<std::mutex>();  // as PutReactor's
  const v1::GetBlocksRequest* const request_;
  v1::GetBlocksResponse response_;
  std::atomic<bool> cancelled_{false};
  uint64_t block_bytes_ = 0;
  std::vector<BlockRange> runs_;
  std::vector<Step> steps_;
  size_t step_ = 0, run_ = 0;
  uint64_t offset_ = 0;
};

}  // namespace

grpc::ServerReadReactor<v1::PutBlocksRequest>* PutBlocks(const ServiceContext* context, CallContext* call,
                                                         v1::PutBlocksResponse* response) {
  auto* reactor = new PutReactor(context, call, response);
  reactor->Begin();
  return reactor;
}

grpc::ServerWriteReactor<v1::GetBlocksResponse>* GetBlocks(const ServiceContext* context, CallContext* call,
                                                           const v1::GetBlocksRequest* request) {
  auto* reactor = new GetReactor(context, CallerOf(*context, *call), request);
  reactor->Begin();
  return reactor;
}

}  // namespace spectrumkv
