// codec bench: GB/s of raw KV on one core, beside memcpy of the same bytes. float16 chunks of at most 1 MiB.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "client/ctl/codec.h"
#include "client/ctl/output.h"
#include "kernels/codec/codec_math.h"

namespace spectrumkv::ctl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Tier kTiers[] = {Tier::kRaw, Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2, Tier::kP8, Tier::kP4};

// GB/s of `work` on `bytes`, repeated for `seconds`.
template <typename Work>
double Measure(uint64_t bytes, double seconds, const Work& work) {
  work();  // warm
  uint64_t rounds = 0;
  const auto begin = Clock::now();
  double elapsed = 0;
  do {
    work();
    ++rounds;
    elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
  } while (elapsed < seconds);
  return static_cast<double>(bytes) * static_cast<double>(rounds) / elapsed / 1e9;
}

std::vector<uint8_t> NormalHalves(uint64_t bytes) {
  std::vector<uint8_t> words(bytes);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i + 1 < words.size(); i += 2) {
    const auto half = static_cast<uint16_t>(FloatToHalf(normal(random)));
    std::memcpy(words.data() + i, &half, sizeof(half));
  }
  return words;
}

class Bench {
 public:
  Bench(const ChunkDims& dims, double seconds)
      : dims_(dims),
        seconds_(seconds),
        source_(NormalHalves(KvBytes(dims))),
        target_(source_.size()),
        chunk_(MaxChunkBytes(dims)) {}

  double Memcpy() {
    return Measure(source_.size(), seconds_, [&] { std::memcpy(target_.data(), source_.data(), source_.size()); });
  }

  double Encode(const Backend& backend, Tier tier) {
    const std::vector<uint8_t> tiers(dims_.tokens, TierMapByte(tier, tier));
    const auto k_rows = Rows(std::as_const(source_).data(), dims_);
    const auto v_rows = Rows(std::as_const(source_).data() + source_.size() / 2, dims_);
    const int64_t head_stride = int64_t{dims_.head_dim} * 2;
    const SourcePlane k{k_rows.data(), head_stride, 2}, v{v_rows.data(), head_stride, 2};
    return Measure(source_.size(), seconds_, [&] {
      chunk_bytes_ =
          backend.Encode(dims_, {}, k, &v, tiers.data(), &workspace_, chunk_.data(), chunk_.size()).chunk_bytes;
    });
  }

  // Of what Encode wrote last, checks included.
  double Decode(const Backend& backend) {
    const auto k_rows = Rows(target_.data(), dims_), v_rows = Rows(target_.data() + target_.size() / 2, dims_);
    const int64_t head_stride = int64_t{dims_.head_dim} * 2;
    const TargetPlane k{k_rows.data(), head_stride, 2}, v{v_rows.data(), head_stride, 2};
    return Measure(source_.size(), seconds_, [&] {
      ChunkView view;
      if (ParseChunk(chunk_.data(), chunk_bytes_, &view) != Refusal::kNone) return;
      backend.Decode(view, dims_.dtype, k, &v, &workspace_);
    });
  }

  uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  const ChunkDims dims_;
  const double seconds_;
  std::vector<uint8_t> source_, target_, chunk_;
  uint64_t chunk_bytes_ = 0;
  Workspace workspace_;
};

}  // namespace

absl::StatusOr<int> CodecBench(const Context& context, Args args) {
  const auto backends = ChooseBackends(args.Text("backend"));
  const double seconds = args.Real("seconds", 0.2);
  const auto head_dim = static_cast<uint32_t>(args.Number("head-dim", 128, 8, kMaxHeadDim));
  const auto heads = static_cast<uint32_t>(args.Number("heads", 8, 1, kMaxHeads));
  if (head_dim % 8 != 0) args.Refuse("--head-dim must be a multiple of 8");
  if (seconds <= 0 || seconds > 60) args.Refuse("--seconds must be above 0 and at most 60");
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  if (!backends.ok()) return backends.status();
  const ChunkDims dims{TokensPerChunk(heads, head_dim, DType::kFloat16, true), heads, head_dim};
  if (KvBytes(dims) > 2 * kMaxChunkKvBytes) return UsageError("one token of --heads and --head-dim fills no chunk");
  Bench bench(dims, seconds);
  const double memcpy_rate = bench.Memcpy();
  std::vector<std::vector<std::string>> rows = {{"BACKEND", "TIER", "WIRE", "ENCODE GB/s", "DECODE GB/s"}};
  std::string json;
  for (const Backend* backend : *backends) {
    for (const Tier tier : kTiers) {
      const double encode = bench.Encode(*backend, tier), decode = bench.Decode(*backend);
      const double wire = static_cast<double>(bench.chunk_bytes()) / static_cast<double>(KvBytes(dims));
      rows.push_back({backend->name(), TierName(tier), Percent(wire), Real(encode, 2), Real(decode, 2)});
      json += std::string(json.empty() ? "" : ", ") + "{\"backend\": \"" + backend->name() + "\", \"tier\": \"" +
              TierName(tier) + "\", \"wire_share\": " + Real(wire, 4) + ", \"encode_gbps\": " + Real(encode, 3) +
              ", \"decode_gbps\": " + Real(decode, 3) + "}";
    }
  }
  if (context.json) {
    std::printf("{\"memcpy_gbps\": %.3f, \"results\": [%s]}\n", memcpy_rate, json.c_str());
  } else {
    std::printf("chunks of %s (%u tokens, %u heads, head_dim %u, float16), one core; memcpy %.2f GB/s\n%s",
                Bytes(KvBytes(dims)).c_str(), dims.tokens, heads, head_dim, memcpy_rate, Table(rows).c_str());
  }
  return kOk;
}

}  // namespace spectrumkv::ctl
