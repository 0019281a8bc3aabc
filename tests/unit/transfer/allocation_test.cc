// What the data path allocates for a chunk. Counts every operator new of the process while two engines move a source of
// N chunks and one of 2N; the difference over N is what one chunk more costs, at both ends together.
//
// MemoryTransport's own, measured alone in the same run, are taken off; gRPC's messages and slices are not in the
// counts at all, for no gRPC is in this program.
//
// None of it is memory for bytes of chunks: those lie in staging slots and in pools. What remains is small, at both
// ends together about 19 a chunk that goes over the executors and 16 one that does not, about 4 less where it is coded:
//   1  the chunk's tier map, 1 the columns of the planner's cost model
//   2  sender: the shared handle of its slot, the task to the compute executor; 1 the task back to the strand
//   3  sender: the callback for "the chunk has left", the transport's copy of it, the task it becomes
//   3  receiver: the shared handles of slot and chunk, the task to the compute executor; 1 the task back to the strand
//   4  sender, of RAW words that stay in the source: the list of their pieces as it grows, the list for the transport
//   1  turns of the strands on their executor
//   2  an eighth or so of a credit frame's sixteen (a frame every fourth chunk, both ends, as protobuf)
// A task is a std::function whose captures are larger than two words: one allocation for each hop between executors.
// Fewer would take executors with tasks of their own, and they cost some tens of nanoseconds beside the 100 us of a
// chunk.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "tests/unit/transfer/two_engines.h"

namespace {
std::atomic<uint64_t> g_allocations{0};

void* Allocate(std::size_t bytes, std::size_t alignment) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = alignment <= alignof(std::max_align_t)
                     ? std::malloc(bytes == 0 ? 1 : bytes)
                     : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();  // no test frees it
  return memory;
}
}  // namespace

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // gcc 12 inlines one of a pair and misses the other
#endif
void* operator new(std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new[](std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return Allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t at) { return Allocate(bytes, static_cast<std::size_t>(at)); }
void* operator new[](std::size_t bytes, std::align_val_t at) { return Allocate(bytes, static_cast<std::size_t>(at)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace spectrumkv {
namespace {

// Takes chunks and forgets them.
class Sink final : public DataListener {
 public:
  void OnChunk(std::unique_ptr<ReceivedChunk>) override {}
  void OnClosed(absl::Status) override {}
};
class SinkAcceptor final : public PeerAcceptor {
 public:
  std::shared_ptr<ControlListener> OnControl(std::shared_ptr<ControlStream>) override { return nullptr; }
  std::shared_ptr<DataListener> OnData(std::shared_ptr<DataStream>, const DataOpenFrame&) override {
    return std::make_shared<Sink>();
  }
};

// What MemoryTransport itself allocates to carry one chunk.
double TransportPerChunk(uint64_t chunk_bytes) {
  constexpr int kChunks = 64;
  ManualExecutor executor;
  SinkAcceptor acceptor;
  SlotPool slots(1, kMaxChunkKvBytes);
  MemoryNetwork network(&executor);
  network.AddEnd("sink", &acceptor);
  const std::unique_ptr<Transport> transport = network.TransportOf("source");
  const std::shared_ptr<DataStream> data = transport->OpenData("sink", DataOpenFrame{}, std::make_shared<Sink>());
  executor.RunAll();
  int sent = 0;
  const auto send = [&](int chunks) {
    const uint64_t before = g_allocations.load();
    for (int i = 0; i < chunks; ++i) {
      data->SendChunk({slots.TryAcquire(), chunk_bytes, {}, nullptr}, [&sent](bool) { ++sent; });
      executor.RunAll();
    }
    return g_allocations.load() - before;
  };
  const uint64_t once = send(kChunks);
  const uint64_t twice = send(2 * kChunks);
  EXPECT_EQ(sent, 3 * kChunks);
  data->Close(absl::OkStatus());
  executor.RunAll();
  network.RemoveEnd("sink");
  executor.RunAll();
  return (static_cast<double>(twice) - static_cast<double>(once)) / kChunks;
}

constexpr uint32_t kLayers = 4;
constexpr uint32_t kBlockTokens = 256;
// About a third above what was measured: who runs what, and so who allocates a turn, differs from run to run.
constexpr double kPerChunk = 24, kPerSmallChunk = 20;

// Chunks of 4096 tokens of 32 bytes.
constexpr uint32_t kChunksPerLayer = 16;

class AllocationTest : public EngineTest {
 protected:
  // Slots for as many credits as a daemon grants by default: a credit frame every fourth chunk.
  static EngineSettings DefaultRoom() {
    EngineSettings settings;
    settings.slots = 2 * settings.options.credits_per_transfer;
    return settings;
  }

  void PreparePools() {
    source_layout_.layers = target_layout_.layers = kLayers;
    source_layout_.heads = target_layout_.heads = 1;
    source_layout_.head_dim = target_layout_.head_dim = 8;
    source_layout_.block_tokens = target_layout_.block_tokens = kBlockTokens;
    source_layout_.num_blocks = target_layout_.num_blocks = 2 * kChunksPerLayer * kMaxChunkTokens / kBlockTokens;
    source_pool_ = a_->AddPool(source_layout_);
    target_pool_ = b_->AddPool(target_layout_);
  }

  // Allocations of a transfer of so many chunks, from Send to its end at both sides.
  uint64_t Count(const std::string& id, uint32_t chunks_per_layer, const Policy& policy) {
    const uint32_t tokens = chunks_per_layer * kMaxChunkTokens;
    const uint64_t blocks = tokens / kBlockTokens;
    std::unique_ptr<BlockHold> target = b_->Target(target_pool_, {{0, blocks}}, tokens);
    std::unique_ptr<BlockHold> source = a_->Source(source_pool_, {{0, blocks}}, tokens);
    EXPECT_TRUE(b_->manager().StartReceiver(Expect(id, std::move(target))).ok());
    auto received = b_->Watch(id, Role::kReceiver);
    const uint64_t before = g_allocations.load();
    EXPECT_TRUE(a_->manager().StartSender(Send(id, std::move(source), policy)).ok());
    auto sent = a_->Watch(id, Role::kSender);
    const TransferReport report = received->WaitTerminal();
    EXPECT_EQ(sent->WaitTerminal().state, TransferState::kCommitted);
    const uint64_t after = g_allocations.load();
    EXPECT_EQ(report.state, TransferState::kCommitted);
    EXPECT_EQ(report.chunks, kLayers * chunks_per_layer);
    chunk_bytes_ = report.wire_bytes / report.chunks;
    return after - before;
  }

  double PerChunk(const Policy& policy) {
    // Threads meet their largest chunk, and tables of the process get their size, before anything is counted.
    Count("warm", 2 * kChunksPerLayer, policy);
    const uint64_t once = Count("once", kChunksPerLayer, policy);
    const uint64_t twice = Count("twice", 2 * kChunksPerLayer, policy);
    const double per_chunk = (static_cast<double>(twice) - static_cast<double>(once)) / (kLayers * kChunksPerLayer);
    const double transport = TransportPerChunk(chunk_bytes_);
    std::printf("%u chunks: %llu allocations, %u chunks: %llu; %.2f a chunk, %.2f of them the transport's\n",
                kLayers * kChunksPerLayer, static_cast<unsigned long long>(once), 2 * kLayers * kChunksPerLayer,
                static_cast<unsigned long long>(twice), per_chunk, transport);
    return per_chunk - transport;
  }

  uint64_t chunk_bytes_ = 0;
};

Policy Coded() {
  Policy policy;
  policy.budget = 0.9;
  return policy;
}

TEST_F(AllocationTest, ChunksThatGoOverTheExecutors) {
  inline_chunk_bytes_ = 0;
  Build(DefaultRoom());
  PreparePools();
  EXPECT_LT(PerChunk(Raw()), kPerChunk);
}

TEST_F(AllocationTest, CodedChunksThatGoOverTheExecutors) {
  inline_chunk_bytes_ = 0;
  Build(DefaultRoom());
  PreparePools();
  EXPECT_LT(PerChunk(Coded()), kPerChunk);
}

TEST_F(AllocationTest, SmallChunksThatAreCodedWhereTheyAreMet) {
  inline_chunk_bytes_ = kMaxChunkKvBytes;
  Build(DefaultRoom());
  PreparePools();
  EXPECT_LT(PerChunk(Raw()), kPerSmallChunk);
}

}  // namespace
}  // namespace spectrumkv
