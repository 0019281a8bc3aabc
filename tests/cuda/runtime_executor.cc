#include "tests/cuda/runtime_executor.h"

#include <cstring>
#include <stdexcept>

namespace spectrumkv::testing {
namespace {

constexpr uint64_t kAlign = 256;

void Must(const gpu::CallStatus& status, const char* what) {
  if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.name + ", " + status.words);
}

class RuntimeExecutor final : public Executor {
 public:
  explicit RuntimeExecutor(gpu::Runtime* runtime) : runtime_(*runtime) {
    gpu::ContextCost cost;
    Must(runtime_.MakeContext(0, &cost), "MakeContext");
    Must(runtime_.CreateStream(0, &stream_), "CreateStream");
  }
  ~RuntimeExecutor() override {
    Forget();
    runtime_.DestroyStream(stream_);
  }

  std::string name() const override { return "device"; }
  void Allow(std::vector<shim::Range> memory) override {
    Forget();
    for (const shim::Range& range : memory) {
      if (range.bytes == 0) continue;
      Copy copy;
      copy.host = static_cast<uint8_t*>(const_cast<void*>(range.begin));
      copy.bytes = range.bytes;
      Must(runtime_.Allocate(0, range.bytes + kAlign, &copy.allocated), "Allocate");
      Must(runtime_.AllocatePinned(0, range.bytes, &copy.pinned), "AllocatePinned");
      copy.device = static_cast<uint8_t*>(copy.allocated) + reinterpret_cast<uintptr_t>(copy.host) % kAlign;
      copies_.push_back(copy);
    }
  }
  void EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace) override {
    std::vector<gpu::EncodeJob> moved(jobs, jobs + count);
    for (gpu::EncodeJob& job : moved) {
      MoveChunk(&job);
      job.tiers = At(job.tiers);
    }
    Run([&] { return runtime_.EncodeBatch(moved.data(), count, At(workspace), WorkspaceOf(jobs, count), stream_); });
  }
  void DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace) override {
    std::vector<gpu::DecodeJob> moved(jobs, jobs + count);
    for (gpu::DecodeJob& job : moved) MoveChunk(&job);
    Run([&] { return runtime_.DecodeBatch(moved.data(), count, At(workspace), WorkspaceOf(jobs, count), stream_); });
  }
  void ScanBatch(const gpu::ScanJob* jobs, uint32_t count) override {
    std::vector<gpu::ScanJob> moved(jobs, jobs + count);
    for (gpu::ScanJob& job : moved) {
      Move(&job.plane);
      job.scans = At(job.scans);
    }
    Run([&] { return runtime_.ScanBatch(moved.data(), count, stream_); });
  }
  void SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count) override {
    std::vector<gpu::SpreadJob> moved(jobs, jobs + count);
    for (gpu::SpreadJob& job : moved) {
      Move(&job.plane);
      job.spreads = At(job.spreads);
    }
    Run([&] { return runtime_.SpreadBatch(moved.data(), count, stream_); });
  }
  void Attend(const gpu::AttendJob& job, void* workspace) override {
    gpu::AttendJob moved = job;
    Move(&moved.k);
    moved.values = At(job.values);
    moved.positions = At(job.positions);
    moved.scores = At(job.scores);
    const size_t bytes = gpu::AttendWorkspaceBytes(job.dims, job.queries);
    Run([&] { return runtime_.Attend(moved, At(workspace), bytes, stream_); });
  }
  void Zero(const gpu::ZeroJob& job) override {
    gpu::ZeroJob moved = job;
    Move(&moved.plane);
    Run([&] { return runtime_.ZeroTokens(moved, stream_); });
  }

 private:
  struct Copy {
    uint8_t* host = nullptr;
    uint64_t bytes = 0;
    void *allocated = nullptr, *pinned = nullptr;
    uint8_t* device = nullptr;
  };

  void Forget() {
    for (const Copy& copy : copies_) {
      runtime_.Free(0, copy.allocated);
      runtime_.FreePinned(0, copy.pinned);
    }
    copies_.clear();
  }
  // Null for what is null.
  template <typename T>
  T* At(T* host) const {
    const auto* address = reinterpret_cast<const uint8_t*>(host);
    for (const Copy& copy : copies_) {
      if (address < copy.host || address >= copy.host + copy.bytes) continue;
      return reinterpret_cast<T*>(copy.device + (address - copy.host));
    }
    if (host == nullptr) return nullptr;
    throw std::runtime_error("a job points outside of the memory it was allowed");
  }
  void Move(gpu::DevicePlane* plane) const {
    plane->base = At(plane->base);
    plane->runs = At(plane->runs);
  }
  template <typename Job>
  void MoveChunk(Job* job) const {
    Move(&job->k);
    Move(&job->v);
    job->chunk = At(job->chunk);
    job->report = At(job->report);
  }
  template <typename Job>
  static size_t WorkspaceOf(const Job* jobs, uint32_t count) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; ++i) bytes += gpu::WorkspaceBytes(jobs[i].dims);
    return bytes;
  }
  template <typename Launch>
  void Run(const Launch& launch) {
    for (const Copy& copy : copies_) {
      std::memcpy(copy.pinned, copy.host, copy.bytes);
      Must(runtime_.Copy(copy.device, copy.pinned, copy.bytes, stream_), "Copy");
    }
    const gpu::LaunchStatus launched = launch();
    if (!launched.ok()) throw std::runtime_error(std::string("launch: ") + launched.wrong);
    for (const Copy& copy : copies_) Must(runtime_.Copy(copy.pinned, copy.device, copy.bytes, stream_), "Copy");
    Must(runtime_.Synchronize(stream_), "Synchronize");
    for (const Copy& copy : copies_) std::memcpy(copy.host, copy.pinned, copy.bytes);
  }

  gpu::Runtime& runtime_;
  gpu::DeviceStream stream_;
  std::vector<Copy> copies_;
};

}  // namespace

std::unique_ptr<Executor> MakeRuntimeExecutor(gpu::Runtime* runtime) {
  return std::make_unique<RuntimeExecutor>(runtime);
}

}  // namespace spectrumkv::testing
