// What `spectrumkvctl profile` measures of a model from captured KV, and how it writes it down. docs/allocators.md, "Model
// profiles", has the formulas.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/npy.h"
#include "kernels/codec/backend.h"

namespace spectrumkv::ctl {

// Captured from one prompt.
struct Capture {
  Array kv;       // [layers, 2, tokens, heads, head_dim]: K after RoPE, V; float16, float32 or bfloat16 words
  Array queries;  // [layers, positions, query_heads, head_dim] of the last positions, after RoPE; empty where not given
};

struct ProfileOptions {
  std::string model, revision;
  uint32_t sinks = 4;          // tokens at the front that will be RAW
  bool layer_weights = false;  // write the sensitivities as weights
};

struct LayerFindings {
  // Largest root mean square of a key channel around the centres of its runs, over the median channel's; the same without
  // centres, which is what the plain tiers meet.
  double outliers = 0, outliers_uncentred = 0;
  // Error of the attention output that K at Q3 makes, over that of V, each for its own relative error; and the geometric mean
  // of both over the output's energy. 0 without queries.
  double k_to_v = 0, sensitivity = 0;
};

struct Findings {
  uint32_t layers = 0, heads = 0, head_dim = 0;
  uint64_t tokens = 0;
  bool queries = false;
  std::array<double, kTierCount> k_errors{}, v_errors{};  // relative squared, mean over the layers
  double k_weight = 0;                                    // 0 without queries
  std::vector<double> layer_weights;                      // empty without queries
  std::vector<LayerFindings> by_layer;
};

// INVALID_ARGUMENT (USAGE) for arrays whose shapes or types do not fit together.
absl::StatusOr<Findings> MeasureProfile(const Backend& backend, const std::vector<Capture>& captures,
                                        const ProfileOptions& options);

// As the daemon reads it from policy.profile_dir.
std::string ProfileYaml(const Findings& findings, const ProfileOptions& options);

}  // namespace spectrumkv::ctl
