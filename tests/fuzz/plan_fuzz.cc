// Any policy, shape, scan and split into batches, read from the input: the planner answers with an error or keeps its
// promises (every chunk once, exact sizes, never above the budget, the same again), and never crashes.
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "server/plan/plan.h"

namespace spectrumkv {
namespace {

void Check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

// Bytes of the input, then zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  uint8_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  uint32_t Below(uint32_t n) { return (Byte() | static_cast<uint32_t>(Byte()) << 8) % n; }
  float Float() {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits = bits << 8 | Byte();
    return std::bit_cast<float>(bits);
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

struct Case {
  Policy policy;
  std::vector<PlanLayer> layers;
  uint32_t tokens = 0;
  std::vector<LayerScan> scan;
};

std::vector<TokenScan> ReadPlane(Input* in, uint32_t tokens) {
  std::vector<TokenScan> plane(tokens);
  const uint8_t kind = in->Byte();
  if (kind % 4 == 0) return {};
  for (TokenScan& token : plane) {
    const uint8_t byte = in->Byte();
    token.energy_log2 = byte;
    if (kind % 4 == 3) token.escape = static_cast<EscapeClass>(byte % 4);
  }
  return plane;
}

Case Read(Input* in) {
  Case c;
  Policy& p = c.policy;
  p.allocator = static_cast<Allocator>(in->Byte() % 9);
  p.budget = in->Byte() % 8 == 0 ? in->Float() : in->Below(1101) / 1000.0;
  p.uniform_tier = static_cast<Tier>(in->Byte() % 8);
  p.random_seed = in->Byte();
  p.tiers.clear();
  for (uint8_t count = in->Byte() % 8; count > 0; --count) p.tiers.push_back(static_cast<Tier>(in->Byte() % 8));
  const uint8_t flags = in->Byte();
  p.allow_drop = flags & 1;
  p.strict_budget = flags & 2;
  p.payload_only = flags & 4;
  p.scores_per_layer = flags & 8;
  p.importance = static_cast<ImportanceSource>(in->Byte() % 3);
  p.decay_lambda = flags & 16 ? in->Float() : in->Byte() / 256.0;
  p.sinks = in->Byte();
  c.tokens = in->Below(600);
  uint16_t index = 0;
  for (uint8_t count = in->Byte() % 5; count > 0; --count) {
    PlanLayer layer;
    layer.layer = index;
    index = static_cast<uint16_t>(index + in->Byte() % 3);  // sometimes not ascending
    layer.heads = in->Below(1026);
    layer.head_dim = 8 * in->Below(130);
    layer.dtype = static_cast<DType>(1 + in->Byte() % 3);
    layer.has_v = in->Byte() % 4 != 0;
    layer.raw_only = in->Byte() % 8 == 0;
    c.layers.push_back(layer);
  }
  if (p.importance == ImportanceSource::kScores) {
    p.scores.resize(c.tokens * (p.scores_per_layer ? c.layers.size() : 1) + (flags & 32 ? 1 : 0));
    for (float& score : p.scores) score = flags & 64 ? in->Float() : in->Byte();
  }
  for (const PlanLayer& layer : c.layers) {
    LayerScan scan;
    scan.k = ReadPlane(in, c.tokens);
    if (layer.has_v) scan.v = ReadPlane(in, c.tokens);
    c.scan.push_back(std::move(scan));
  }
  return c;
}

// Chunk by chunk; what the batch says of itself.
void CheckBatch(const Planner& planner, const std::vector<uint32_t>& wanted, const PlanBatch& batch) {
  Check(batch.chunks.size() == wanted.size(), "one planned chunk for each asked for");
  uint64_t wire = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const PlannedChunk& chunk = batch.chunks[i];
    const PlanLayer& layer = planner.shape().layers[chunk.cut.layer_index];
    Check(chunk.cut.chunk_index == wanted[i], "chunks in the order asked for");
    Check(chunk.tier_map.size() == chunk.cut.token_count, "a tier for every token");
    for (const uint8_t byte : chunk.tier_map) {
      Check((byte & 15) < kTierCount && (byte >> 4) < kTierCount && (layer.has_v || byte >> 4 == 0), "valid tiers");
    }
    const TierCounts counts = CountTiers(chunk.tier_map.data(), chunk.cut.token_count, layer.has_v);
    Check(chunk.chunk_bytes == ChunkBytes(DimsOf(layer, chunk.cut.token_count), counts), "exact chunk bytes");
    wire += chunk.chunk_bytes;
  }
  Check(batch.wire_bytes == wire, "exact wire bytes");
}

// `twice`: plans all a second time, which takes as long again.
void Run(const Case& c, Input in, bool twice) {
  absl::StatusOr<Planner> planner = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
  absl::StatusOr<Planner> again = absl::UnknownError("");
  if (twice) {
    again = Planner::Create(c.policy, c.layers, c.tokens, &c.scan);
    Check(planner.status() == again.status(), "the same answer twice");
  }
  if (!planner.ok()) return;
  const uint32_t kept = planner->shape().kept_count();
  Check(kept >= 1 && kept <= c.tokens, "some tokens travel");
  std::vector<LayerScan> scan(c.scan.size());
  for (size_t l = 0; l < scan.size(); ++l) {
    for (const TokenRange& range : planner->shape().kept) {
      for (uint32_t t = range.first; t < range.first + range.count; ++t) {
        if (!c.scan[l].k.empty()) scan[l].k.push_back(c.scan[l].k[t]);
        if (!c.scan[l].v.empty()) scan[l].v.push_back(c.scan[l].v[t]);
      }
    }
  }
  std::vector<std::vector<uint32_t>> batches(1 + in.Byte() % 4);
  for (const ChunkCut& cut : planner->cuts()) batches[in.Byte() % batches.size()].push_back(cut.chunk_index);
  uint64_t budget = static_cast<uint64_t>(c.policy.budget * static_cast<double>(KvBytesOf(planner->shape())));
  uint64_t spent = 0;
  for (const std::vector<uint32_t>& wanted : batches) {
    absl::StatusOr<PlanBatch> batch = planner->Plan(wanted, scan);
    if (twice) {
      const absl::StatusOr<PlanBatch> same = again->Plan(wanted, scan);
      Check(batch.status() == same.status(), "the same batch twice");
      Check(!batch.ok() || (batch->wire_bytes == same->wire_bytes && batch->escaped == same->escaped),
            "the same batch twice");
    }
    if (!batch.ok()) continue;
    CheckBatch(*planner, wanted, *batch);
    Check(planner->Plan(wanted, scan).status().code() == absl::StatusCode::kInvalidArgument, "no chunk twice");
    spent += batch->wire_bytes;
    budget += batch->escape_overrun_bytes;
    Check(c.policy.payload_only || spent <= budget, "never above the budget");
  }
  planner->LeastBudget(scan);
}

}  // namespace
}  // namespace spectrumkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  spectrumkv::Input in(data, size);
  const spectrumkv::Case c = spectrumkv::Read(&in);
  spectrumkv::Run(c, in, /*twice=*/size % 4 == 0);
  return 0;
}
