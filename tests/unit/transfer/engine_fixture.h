// Two daemons' engines in one process, joined by a MemoryTransport, over daemon-owned pools.
#pragma once

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backends.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/memory/device.h"
#include "server/stream/memory_transport.h"
#include "server/transfer/transfer_manager.h"
#include "tests/unit/base/me.h"
#include "tests/unit/transfer/forwarding_backend.h"

namespace spectrumkv {

// Which layers, in which memory order, in blocks of how many tokens.
struct PoolLayout {
  uint32_t layers = 3;
  uint32_t heads = 2;
  uint32_t head_dim = 64;
  DType dtype = DType::kFloat16;
  uint32_t block_tokens = 16;
  uint64_t num_blocks = 32;
  bool heads_first = false;  // HND
  bool generations = false;
  std::string device;  // uuid
};

inline PoolSchema MakeSchema(const PoolLayout& layout) {
  PoolSchema schema;
  schema.model = "test-model";
  schema.revision = "1";
  GroupSchema group;
  group.dtype = layout.dtype;
  group.heads_total = group.head_count = layout.heads;
  group.head_dim = layout.head_dim;
  group.block_tokens = layout.block_tokens;
  group.num_blocks = layout.num_blocks;
  const uint64_t element = SizeOf(layout.dtype);
  const uint64_t cell = element * layout.head_dim;
  const uint64_t block = cell * layout.heads * layout.block_tokens;
  uint64_t at = 0;
  auto tensor = [&] {
    TensorSchema t;
    t.offset_bytes = at;
    t.block_stride_bytes = block;
    t.token_stride_bytes = layout.heads_first ? cell : cell * layout.heads;
    t.head_stride_bytes = layout.heads_first ? cell * layout.block_tokens : cell;
    t.dim_stride_bytes = element;
    at += block * layout.num_blocks;
    return t;
  };
  for (uint32_t i = 0; i < layout.layers; ++i) {
    LayerSchema layer;
    layer.layer = i;
    layer.k = tensor();
    layer.v = tensor();
    group.layers.push_back(layer);
  }
  schema.groups = {group};
  if (layout.generations) {
    schema.generations = PoolSchema::Generations{0, at};
    at += 8 * layout.num_blocks;
  }
  SegmentSpec segment;
  segment.kind = SegmentSpec::Kind::kDaemonOwned;
  segment.size_bytes = at;
  segment.device = layout.device;
  schema.segments = {segment};
  return schema;
}

// Waits for the end of a transfer and remembers what it heard on the way.
class RecordingWatcher : public TransferWatcher {
 public:
  void OnLayersReady(uint32_t layers) override {
    std::lock_guard<std::mutex> lock(mutex_);
    layers_ = layers;
    changed_.notify_all();
  }
  void OnProgress(const TransferReport& report) override {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.push_back(report.state);
  }
  void OnTerminal(const TransferReport& report) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++terminals_;
    report_ = report;
    changed_.notify_all();
  }
  bool WaitLayers(uint32_t layers, int seconds = 20) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(seconds), [&] { return layers_ >= layers; });
  }
  // The report; its transfer_id is empty if the end did not come.
  TransferReport WaitTerminal(int seconds = 20) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(seconds), [&] { return terminals_ > 0; });
    EXPECT_EQ(terminals_, 1) << "exactly one terminal event";
    return report_;
  }
  bool ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return terminals_ > 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t layers_ = 0;
  int terminals_ = 0;
  TransferReport report_;
  std::vector<TransferState> states_;
};

// Passes everything to a real backend, but a test may hold decodes at a gate.
class GatedBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  DecodeResult Decode(const ChunkView& chunk, DType target, const TargetPlane& k, const TargetPlane* v,
                      Workspace* workspace) const override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ++decoding_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_; });
      --decoding_;
    }
    return ForwardingBackend::Decode(chunk, target, k, v, workspace);
  }
  void SetOpen(bool open) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  bool WaitForADecode(int seconds = 20) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(seconds), [&] { return decoding_ > 0; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int decoding_ = 0;
  bool open_ = true;
};

struct EngineSettings {
  size_t slots = 8;
  gpu::Runtime* runtime = nullptr;  // none: no GPUs
  TransferOptions options;
  const Backend* backend = ScalarBackend();
  uint64_t reconstruction_chunks = 0;  // see Metrics
};

// One daemon's engine: pool registry, slots, executors, manager.
class Engine {
 public:
  Engine(const std::string& name, MemoryNetwork* network, EngineSettings settings, uint64_t epoch)
      : name_(name),
        clock_(NewSystemClock()),
        control_(std::make_unique<ThreadPool>(2)),
        compute_(std::make_unique<ThreadPool>(2)),
        send_slots_(settings.slots, 2 << 20),
        receive_slots_(settings.slots, 2 << 20, SlotPool::Backing::kNone),
        backend_(settings.backend),
        metrics_({"test", "test", "test"}, settings.reconstruction_chunks) {
    PoolLimits limits;
    limits.max_owned_bytes = uint64_t{1} << 30;
    limits.max_chunk_bytes = 2 << 20;
    if (settings.runtime != nullptr) {
      devices_ = Devices::Find(settings.runtime, {});
      devices_->PinWhenUsed(send_slots_.memory().first, send_slots_.memory().second);
    }
    pools_ = PoolRegistry::Create(limits, epoch, clock_.get(), {}, devices_.get());
    settings.options.epoch = epoch;
    transport_ = network->TransportOf(name);
    TransferParts parts;
    parts.clock = clock_.get();
    parts.control = control_.get();
    parts.compute = compute_.get();
    parts.transport = transport_.get();
    parts.send_slots = &send_slots_;
    parts.receive_slots = &receive_slots_;
    parts.backend = &backend_;
    parts.metrics = &metrics_;
    manager_ = TransferManager::Create(settings.options, parts);
    network->AddEnd(name, manager_.get());
    network_ = network;
    epoch_ = epoch;
  }
  // First of all engines, then of the network, then the engines themselves: a stream's last word needs its listener's
  // executor.
  void Stop() {
    backend_.SetOpen(true);
    manager_->Shutdown();
    network_->RemoveEnd(name_);
  }
  ~Engine() {
    clock_->Stop();  // as the daemon: a timer posts to the executors
    compute_.reset();
    control_.reset();
    manager_.reset();
    EXPECT_EQ(send_slots_.used(), 0u) << name_ << ": a send slot leaked";
    EXPECT_EQ(receive_slots_.used(), 0u) << name_ << ": a receive slot leaked";
    pools_.reset();
    devices_.reset();
    clock_.reset();
  }

  std::string AddPool(const PoolLayout& layout) { return AddPool(MakeSchema(layout)); }
  std::string AddPool(const PoolSchema& schema) {
    absl::StatusOr<PoolHandle> handle = pools_->Register(kMe, RandomHex(8), schema, /*lease_ttl_ms=*/600000);
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? handle->pool_id : "";
  }
  std::unique_ptr<BlockHold> Source(const std::string& pool, std::vector<BlockRange> runs, uint32_t tokens) {
    auto hold = pools_->HoldSource(kMe, pool, epoch_, {{0, std::move(runs)}}, tokens);
    EXPECT_TRUE(hold.ok()) << hold.status();
    return hold.ok() ? *std::move(hold) : nullptr;
  }
  std::unique_ptr<BlockHold> Target(const std::string& pool, std::vector<BlockRange> runs, uint32_t tokens) {
    auto hold = pools_->ReserveTarget(kMe, pool, epoch_, {{0, std::move(runs)}}, tokens);
    EXPECT_TRUE(hold.ok()) << hold.status();
    return hold.ok() ? *std::move(hold) : nullptr;
  }
  std::shared_ptr<RecordingWatcher> Watch(const std::string& id, Role role) {
    auto watcher = std::make_shared<RecordingWatcher>();
    absl::StatusOr<uint64_t> watch = manager_->Watch(kMe, id, role, watcher);
    EXPECT_TRUE(watch.ok()) << watch.status();
    return watcher;
  }

  const std::string& name() const { return name_; }
  uint64_t epoch() const { return epoch_; }
  PoolRegistry& pools() { return *pools_; }
  TransferManager& manager() { return *manager_; }
  Transport& transport() { return *transport_; }
  GatedBackend& backend() { return backend_; }
  Metrics& metrics() { return metrics_; }
  Devices* devices() { return devices_.get(); }
  SlotPool& receive_slots() { return receive_slots_; }

 private:
  const std::string name_;
  uint64_t epoch_ = 0;
  std::unique_ptr<Clock> clock_;
  std::unique_ptr<ThreadPool> control_, compute_;
  SlotPool send_slots_, receive_slots_;
  GatedBackend backend_;
  Metrics metrics_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<PoolRegistry> pools_;
  MemoryNetwork* network_ = nullptr;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<TransferManager> manager_;
};

// Fills the given blocks of every layer with seeded values; answers the dense words [layer][plane][token][head][dim].
inline std::vector<std::string> FillBlocks(Engine& engine, const std::string& pool, const PoolLayout& layout,
                                           const std::vector<uint64_t>& blocks, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<std::string> planes;
  const size_t values = size_t{layout.block_tokens} * layout.heads * layout.head_dim;
  for (uint32_t layer = 0; layer < layout.layers; ++layer) {
    for (PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      std::string all;
      for (uint64_t block : blocks) {
        std::string data(values * SizeOf(layout.dtype), '\0');
        for (size_t i = 0; i < values; ++i) {
          const float x = normal(rng);
          if (layout.dtype == DType::kFloat32) {
            std::memcpy(&data[4 * i], &x, 4);
          } else {
            const _Float16 h = static_cast<_Float16>(x);
            std::memcpy(&data[2 * i], &h, 2);
          }
        }
        EXPECT_TRUE(engine.pools().PutBlock(kMe, pool, engine.epoch(), 0, layer, plane, block, data).ok());
        all += data;
      }
      planes.push_back(std::move(all));
    }
  }
  return planes;
}

inline std::vector<std::string> ReadBlocks(Engine& engine, const std::string& pool, const PoolLayout& layout,
                                           const std::vector<uint64_t>& blocks) {
  std::vector<std::string> planes;
  for (uint32_t layer = 0; layer < layout.layers; ++layer) {
    for (PlaneId plane : {PlaneId::kK, PlaneId::kV}) {
      std::string all;
      for (uint64_t block : blocks) {
        absl::StatusOr<std::string> data = engine.pools().GetBlock(kMe, pool, engine.epoch(), 0, layer, plane, block);
        EXPECT_TRUE(data.ok()) << data.status();
        if (data.ok()) all += *data;
      }
      planes.push_back(std::move(all));
    }
  }
  return planes;
}

}  // namespace spectrumkv
