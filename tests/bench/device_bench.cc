#include "tests/bench/device_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "tests/bench/codec_bench.h"

namespace spectrumkv::bench {
namespace {

constexpr Tier kDeviceTiers[] = {Tier::kRaw, Tier::kP8, Tier::kP4, Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2};
constexpr int kLeastRuns = 3;

void Must(const gpu::CallStatus& status, const char* what) {
  if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.name + ", " + status.words);
}
void Must(const gpu::LaunchStatus& status, const char* what) {
  if (!status.ok()) throw std::runtime_error(std::string(what) + ": " + status.wrong);
}

// Device memory, filled from the host where there are bytes for it.
class OnDevice {
 public:
  OnDevice(gpu::Runtime* runtime, gpu::DeviceStream stream, uint64_t bytes, const void* from = nullptr)
      : runtime_(runtime) {
    void* memory = nullptr;
    Must(runtime_->Allocate(0, bytes, &memory), "Allocate");
    data_ = static_cast<uint8_t*>(memory);
    if (from == nullptr) return;
    void* pinned = nullptr;
    Must(runtime_->AllocatePinned(0, bytes, &pinned), "AllocatePinned");
    std::memcpy(pinned, from, bytes);
    Must(runtime_->Copy(data_, pinned, bytes, stream), "Copy");
    Must(runtime_->Synchronize(stream), "Synchronize");
    runtime_->FreePinned(0, pinned);
  }
  ~OnDevice() { runtime_->Free(0, data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  uint8_t* data() const { return data_; }

 private:
  gpu::Runtime* const runtime_;
  uint8_t* data_ = nullptr;
};

class DeviceCase {
 public:
  DeviceCase(gpu::Runtime* runtime, gpu::DeviceStream stream, const CodecCase& c)
      : runtime_(runtime),
        stream_(stream),
        case_(c),
        dims_{TokensPerChunk(c.heads, c.head_dim, c.dtype, true), c.heads, c.head_dim, c.dtype, true},
        chunks_(std::max<uint64_t>(1, c.kv_bytes / KvBytes(dims_))),
        plane_bytes_(KvBytes(dims_) / 2),
        k_(runtime, stream, chunks_ * plane_bytes_, BenchPlane(c, chunks_, dims_.tokens, 2.0f).data()),
        v_(runtime, stream, chunks_ * plane_bytes_, BenchPlane(c, chunks_, dims_.tokens, 0.0f).data()),
        k_back_(runtime, stream, chunks_ * plane_bytes_),
        v_back_(runtime, stream, chunks_ * plane_bytes_),
        runs_(runtime, stream, sizeof(gpu::TokenRun), &kOneRun),
        tiers_(runtime, stream, dims_.tokens,
               std::vector<uint8_t>(dims_.tokens, TierMapByte(c.tier, c.tier)).data()),
        chunk_bytes_(ChunkBytesOf()),
        wire_(runtime, stream, chunks_ * chunk_bytes_),
        report_(runtime, stream, sizeof(gpu::ChunkReport)),
        scans_(runtime, stream, 2 * dims_.tokens * sizeof(TokenScan)),
        workspace_bytes_(gpu::WorkspaceBytes(dims_)),
        workspace_(runtime, stream, workspace_bytes_) {}

  struct Figures {
    double encode_gbs, decode_gbs, scan_gbs, copy_gbs, wire_ratio;
  };
  Figures Measure() {
    const double gb = static_cast<double>(chunks_ * KvBytes(dims_)) * 1e-9;
    Figures figures;
    figures.encode_gbs = gb / Best([this](uint64_t i) {
                           return runtime_->Encode(EncodeOf(i), workspace_.data(), workspace_bytes_, stream_);
                         });
    figures.decode_gbs = gb / Best([this](uint64_t i) {
                           return runtime_->Decode(DecodeOf(i), workspace_.data(), workspace_bytes_, stream_);
                         });
    figures.scan_gbs = gb / Best([this](uint64_t i) {
                         const gpu::ScanJob planes[] = {ScanOf(k_, i, 0), ScanOf(v_, i, dims_.tokens)};
                         return runtime_->ScanBatch(planes, 2, stream_);
                       });
    figures.copy_gbs = gb / Best([this](uint64_t i) {
                         CopyPlane(k_, k_back_, i);
                         CopyPlane(v_, v_back_, i);
                         return gpu::LaunchStatus{};
                       });
    figures.wire_ratio = static_cast<double>(chunk_bytes_) / static_cast<double>(KvBytes(dims_));
    return figures;
  }

 private:
  static constexpr gpu::TokenRun kOneRun{};

  uint64_t ChunkBytesOf() const {
    TierCounts counts;
    counts.k[static_cast<int>(case_.tier)] = counts.v[static_cast<int>(case_.tier)] = dims_.tokens;
    return (ChunkBytes(dims_, counts) + 15) / 16 * 16;
  }
  gpu::DevicePlane PlaneAt(const OnDevice& plane, uint64_t chunk) const {
    const auto word = static_cast<int64_t>(SizeOf(case_.dtype)), head = word * case_.head_dim;
    return {plane.data() + chunk * plane_bytes_, reinterpret_cast<const gpu::TokenRun*>(runs_.data()), 1,
            head * case_.heads, head, word};
  }
  void CopyPlane(const OnDevice& from, const OnDevice& to, uint64_t i) const {
    const uint64_t at = i * plane_bytes_;
    Must(runtime_->Copy(to.data() + at, from.data() + at, plane_bytes_, stream_), "Copy");
  }
  gpu::EncodeJob EncodeOf(uint64_t i) const {
    gpu::EncodeJob job{dims_, PlaneAt(k_, i), PlaneAt(v_, i), tiers_.data()};
    job.chunk = wire_.data() + i * chunk_bytes_;
    job.capacity = chunk_bytes_;
    job.report = reinterpret_cast<gpu::ChunkReport*>(report_.data());
    return job;
  }
  gpu::DecodeJob DecodeOf(uint64_t i) const {
    gpu::DecodeJob job;
    job.dims = dims_;
    job.chunk = wire_.data() + i * chunk_bytes_;
    job.target = case_.dtype;
    job.k = PlaneAt(k_back_, i);
    job.v = PlaneAt(v_back_, i);
    job.report = reinterpret_cast<gpu::ChunkReport*>(report_.data());
    return job;
  }
  gpu::ScanJob ScanOf(const OnDevice& plane, uint64_t i, uint32_t at) const {
    return {dims_, PlaneAt(plane, i), reinterpret_cast<TokenScan*>(scans_.data()) + at};
  }

  // Wall seconds of all chunks on one stream, the quickest run.
  double Best(const std::function<gpu::LaunchStatus(uint64_t)>& launch) {
    using Clock = std::chrono::steady_clock;
    double best = 0, all = 0;
    for (int run = 0; run < kLeastRuns || all < case_.budget_s; ++run) {
      const auto begin = Clock::now();
      for (uint64_t i = 0; i < chunks_; ++i) Must(launch(i), "launch");
      Must(runtime_->Synchronize(stream_), "Synchronize");
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      best = run == 0 ? seconds : std::min(best, seconds);
      all += seconds;
    }
    return best;
  }

  gpu::Runtime* const runtime_;
  const gpu::DeviceStream stream_;
  const CodecCase case_;
  const ChunkDims dims_;
  const uint64_t chunks_, plane_bytes_;
  OnDevice k_, v_, k_back_, v_back_, runs_, tiers_;
  const uint64_t chunk_bytes_;
  OnDevice wire_, report_, scans_;
  const size_t workspace_bytes_;
  OnDevice workspace_;
};

void RunOne(gpu::Runtime* runtime, gpu::DeviceStream stream, const CodecCase& c, bool json) {
  const DeviceCase::Figures f = DeviceCase(runtime, stream, c).Measure();
  std::printf(json ? "{\"kind\": \"codec\", \"mib\": %llu, \"backend\": \"cuda\", \"dtype\": \"%s\", \"head_dim\": %u, \"tier\": "
                     "\"%s\", \"wire_ratio\": %.4f, \"encode_gbs\": %.3f, \"decode_gbs\": %.3f, \"scan_gbs\": %.3f, "
                     "\"copy_gbs\": %.3f}\n"
                   : "%4llu MiB cuda %-9s %5u %-4s %6.3f | encode %8.2f | decode %8.2f | scan %8.2f | copy %8.2f GB/s\n",
              static_cast<unsigned long long>(c.kv_bytes >> 20), DTypeName(c.dtype), c.head_dim, TierName(c.tier),
              f.wire_ratio, f.encode_gbs, f.decode_gbs, f.scan_gbs, f.copy_gbs);
  std::fflush(stdout);
}

}  // namespace

int RunDeviceBench(const DeviceBenchOptions& options, gpu::Runtime* runtime) {
  int devices = 0;
  const gpu::CallStatus counted = runtime->CountDevices(&devices);
  if (devices == 0) {
    std::printf("SKIPPED: no GPU: %s\n", counted.ok() ? "the driver has none" : counted.words);
    return 77;
  }
  try {
    gpu::DeviceStream stream;
    gpu::ContextCost context;
    Must(runtime->MakeContext(0, &context), "MakeContext");
    Must(runtime->CreateStream(0, &stream), "CreateStream");
    for (uint64_t mib : options.kv_mib) {
      for (DType dtype : options.dtypes) {
        for (uint32_t head_dim : options.head_dims) {
          for (Tier tier : kDeviceTiers) {
            if (!options.tier.empty() && options.tier != TierName(tier)) continue;
            RunOne(runtime, stream, CodecCase{nullptr, tier, dtype, 8, head_dim, mib << 20, options.budget_s}, options.json);
          }
        }
      }
    }
    runtime->DestroyStream(stream);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "cuda: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace spectrumkv::bench
