#include "tests/bench/transfers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"

namespace spectrumkv::bench {
namespace {

absl::Status Failed(const char* what, const grpc::Status& status) {
  return absl::UnknownError(absl::StrCat(what, ": ", status.error_message()));
}

void AddBlocks(const Blocks& blocks, v1::GroupBlocks* out) {
  out->mutable_runs()->Reserve(static_cast<int>(blocks.size()));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool extends = i > 0 && blocks[i] == blocks[i - 1] + 1;
    v1::BlockRun* run = extends ? out->mutable_runs(out->runs_size() - 1) : out->add_runs();
    if (!extends) run->set_first(blocks[i]);
    run->set_count(run->count() + 1);
  }
}

// Follows the receiver's events from before Send until the end.
class Watcher {
 public:
  Watcher(v1::WorkerService::Stub* worker, const std::string& id) {
    v1::WatchTransferRequest watch;
    watch.mutable_transfer()->set_transfer_id(id);
    events_ = worker->WatchTransfer(&context_, watch);
    thread_ = std::thread([this] { Run(); });
  }
  ~Watcher() {
    context_.TryCancel();
    if (thread_.joinable()) thread_.join();
  }
  absl::Status Wait(double begin, MoveTimes* times) {
    thread_.join();
    if (committed_ == 0) return absl::UnknownError("the watch ended without a terminal event");
    if (report_.state() != v1::TRANSFER_STATE_COMMITTED) return absl::UnknownError(report_.message());
    times->committed_s = committed_ - begin;
    times->first_layer_s = (first_layer_ == 0 ? committed_ : first_layer_) - begin;
    times->report = std::move(report_);
    return absl::OkStatus();
  }

 private:
  void Run() {
    v1::WatchTransferResponse event;
    while (events_->Read(&event)) {
      if (event.has_layers_ready() && event.layers_ready().layers() > 0 && first_layer_ == 0) first_layer_ = Now();
      if (!event.has_terminal()) continue;
      committed_ = Now();
      report_ = std::move(*event.mutable_terminal());
      return;
    }
  }
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::WatchTransferResponse>> events_;
  double first_layer_ = 0, committed_ = 0;
  v1::TransferReport report_;
  std::thread thread_;
};

v1::SendRequest SendRequestOf(const Cluster& cluster, const Request& request, const Variant& variant, const std::string& id) {
  v1::SendRequest send;
  send.set_transfer_id(id);
  send.set_peer(cluster.decode->peer_address());
  *send.mutable_pool() = request.source->ref();
  send.set_token_count(request.tokens);
  AddBlocks(request.source_blocks, send.add_blocks());
  *send.mutable_policy() = variant.policy;
  return send;
}

}  // namespace

absl::StatusOr<Variant> VariantOf(const std::string& name) {
  Variant variant;
  variant.name = name;
  v1::Tier tier;
  if (name == "RAW") {
    variant.policy.set_allocator(v1::ALLOCATOR_RAW);
    variant.policy.set_budget(1.1);
  } else if (name.rfind("b=", 0) == 0) {
    variant.policy.set_allocator(v1::ALLOCATOR_OPTIMAL);
    variant.policy.set_budget(std::atof(name.c_str() + 2));
  } else if (name.rfind("greedy=", 0) == 0) {
    variant.policy.set_allocator(v1::ALLOCATOR_GREEDY);
    variant.policy.set_budget(std::atof(name.c_str() + 7));
  } else if (v1::Tier_Parse("TIER_" + name, &tier)) {
    variant.policy.set_allocator(v1::ALLOCATOR_UNIFORM);
    variant.policy.set_uniform_tier(tier);
    variant.policy.add_tiers(v1::TIER_RAW);
    variant.policy.add_tiers(tier);
    variant.policy.set_budget(name[1] == '8' ? 0.6 : 0.4);
    variant.policy.mutable_importance()->set_sinks(0);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("unknown variant ", name, "; there are RAW, P8, P4, Q8, Q4, Q3, Q2, b=0.3, greedy=0.3"));
  }
  return variant;
}

Blocks ScatteredBlocks(const Shape& shape, uint64_t count, uint32_t seed) {
  Blocks blocks(shape.num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::mt19937 rng(seed);
  std::shuffle(blocks.begin(), blocks.end(), rng);
  blocks.resize(count);
  return blocks;
}

Request Request::Scattered(Pool* source, Pool* target, uint32_t tokens) {
  return {source, target, ScatteredBlocks(source->shape(), source->shape().blocks_of(tokens), 7),
          ScatteredBlocks(target->shape(), target->shape().blocks_of(tokens), 8), tokens};
}

absl::StatusOr<Scene> Scene::Create(const Cluster& cluster, Shape shape, uint32_t tokens) {
  const uint64_t blocks = shape.blocks_of(tokens);
  shape.num_blocks = blocks + (blocks + 3) / 4;
  absl::StatusOr<std::unique_ptr<Pool>> source = Pool::Create(cluster.prefill.get(), shape, 1);
  if (!source.ok()) return source.status();
  absl::StatusOr<std::unique_ptr<Pool>> target = Pool::Create(cluster.decode.get(), shape, 2);
  if (!target.ok()) return target.status();
  Scene scene{*std::move(source), *std::move(target), {}};
  scene.request = Request::Scattered(scene.source.get(), scene.target.get(), tokens);
  return scene;
}

absl::StatusOr<MoveTimes> Move(const Cluster& cluster, const Request& request, const Variant& variant) {
  static std::atomic<uint64_t> count{0};
  const std::string id = absl::StrCat("bench-", getpid(), "-", ++count);
  v1::ExpectRequest expect;
  expect.set_transfer_id(id);
  *expect.mutable_pool() = request.target->ref();
  expect.set_token_count(request.tokens);
  AddBlocks(request.target_blocks, expect.add_blocks());
  expect.set_refinable(variant.policy.retain_seconds() > 0);
  const v1::SendRequest send = SendRequestOf(cluster, request, variant, id);
  MoveTimes times;
  v1::ExpectResponse expected;
  grpc::ClientContext expect_context, send_context;
  const double expect_begin = Now();
  grpc::Status status = cluster.decode->worker()->Expect(&expect_context, expect, &expected);
  times.expect_s = Now() - expect_begin;
  if (!status.ok()) return Failed("Expect", status);
  Watcher watcher(cluster.decode->worker(), id);
  v1::SendResponse sent;
  const double begin = Now();
  status = cluster.prefill->worker()->Send(&send_context, send, &sent);
  times.send_call_s = Now() - begin;
  if (!status.ok()) return Failed("Send", status);
  if (absl::Status ended = watcher.Wait(begin, &times); !ended.ok()) return ended;
  times.total_s = begin - expect_begin + times.committed_s;
  times.id = id;
  return times;
}

absl::StatusOr<RefineTimes> Refine(const Cluster& cluster, const std::string& id, v1::RefineMode mode) {
  v1::RefineRequest refine;
  refine.set_transfer_id(id);
  refine.set_refine_id(id + ".exact");
  refine.set_mode(mode);
  refine.set_deadline_ms(600000);
  v1::RefineResponse started;
  grpc::ClientContext refine_context;
  const double begin = Now();
  grpc::Status status = cluster.decode->worker()->Refine(&refine_context, refine, &started);
  if (!status.ok()) return Failed("Refine", status);
  if (started.cells() == 0 || started.cells_left() > 0) {
    return absl::FailedPreconditionError(absl::StrCat(started.cells(), " cells travel, ", started.cells_left(), " are left"));
  }
  MoveTimes times;
  Watcher watcher(cluster.decode->worker(), refine.refine_id());
  if (absl::Status ended = watcher.Wait(begin, &times); !ended.ok()) return ended;
  if (mode != v1::REFINE_MODE_DIRECT) {
    v1::ApplyRefinementRequest apply;
    apply.set_refine_id(refine.refine_id());
    v1::ApplyRefinementResponse applied;
    grpc::ClientContext apply_context;
    status = cluster.decode->worker()->ApplyRefinement(&apply_context, apply, &applied);
    if (!status.ok()) return Failed("ApplyRefinement", status);
    if (!applied.complete()) return absl::DataLossError("not all was applied");
  }
  return RefineTimes{Now() - begin, std::move(times.report)};
}

absl::Status ReleaseBoth(const Cluster& cluster, const std::string& id) {
  for (Daemon* daemon : {cluster.decode.get(), cluster.prefill.get()}) {
    v1::ReleaseTransferRequest release;
    release.mutable_transfer()->set_transfer_id(id);
    v1::ReleaseTransferResponse released;
    grpc::ClientContext context;
    const grpc::Status status = daemon->worker()->ReleaseTransfer(&context, release, &released);
    if (!status.ok()) return Failed("ReleaseTransfer", status);
  }
  return absl::OkStatus();
}

double RelativeError(const Request& request) {
  double squares = 0, errors = 0;
  const uint64_t words = request.source->shape().block_bytes() / 2;
  for (uint32_t tensor = 0; tensor < 2 * request.source->shape().layers; ++tensor) {
    for (size_t i = 0; i < request.source_blocks.size(); ++i) {
      const auto* from = reinterpret_cast<const _Float16*>(request.source->block(tensor, request.source_blocks[i]));
      const auto* to = reinterpret_cast<const _Float16*>(request.target->block(tensor, request.target_blocks[i]));
      for (uint64_t w = 0; w < words; ++w) {
        const double error = static_cast<double>(to[w]) - static_cast<double>(from[w]);
        errors += error * error;
        squares += static_cast<double>(from[w]) * static_cast<double>(from[w]);
      }
    }
  }
  return std::sqrt(errors / squares);
}

void ClearTarget(const Request& request) {
  for (uint32_t tensor = 0; tensor < 2 * request.target->shape().layers; ++tensor) {
    for (uint64_t block : request.target_blocks) {
      memset(request.target->block(tensor, block), 0, request.target->shape().block_bytes());
    }
  }
}

}  // namespace spectrumkv::bench
