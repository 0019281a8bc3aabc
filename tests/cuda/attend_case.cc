#include "tests/cuda/attend_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu/cpu_backends.h"

namespace spectrumkv::testing {
namespace {

struct alignas(16) Four {
  float f[4];
};

template <typename T>
shim::Range RangeOf(const std::vector<T>& vector) {
  return {vector.data(), vector.size() * sizeof(T)};
}

// Logits of a few units, of some queries far beyond.
std::vector<Four> QueryValues(const AttendCase& test, std::mt19937_64* rng) {
  const uint32_t head_dim = test.dims.head_dim;
  std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(head_dim)));
  std::vector<Four> values(size_t{test.dims.heads} * test.queries * head_dim / 4);
  for (size_t row = 0; row < size_t{test.dims.heads} * test.queries; ++row) {
    const float factor = (*rng)() % 9 == 0 ? 1e5f : 3.0f;
    for (size_t i = 0; i < head_dim; ++i) values[(row * head_dim + i) / 4].f[i % 4] = factor * normal(*rng);
  }
  return values;
}

}  // namespace

std::string RunAttendCase(const AttendCase& test, Executor* executor, uint64_t* checks) {
  const ChunkDims& dims = test.dims;
  std::mt19937_64 rng(test.seed);
  PagedPool keys(dims, dims.dtype, test.shape, 0, test.seed);
  keys.FillRandomly(&rng);
  const std::vector<Four> values = QueryValues(test, &rng);
  std::vector<uint32_t> positions(test.queries);
  for (uint32_t& position : positions) position = static_cast<uint32_t>(rng() % dims.tokens);
  std::sort(positions.begin(), positions.end());
  std::vector<float> scores(size_t{dims.heads} * dims.tokens, -1.0f);
  const size_t workspace_bytes = gpu::AttendWorkspaceBytes(dims, test.queries);
  std::vector<Four> workspace(workspace_bytes / sizeof(Four), Four{{NAN, NAN, NAN, NAN}});
  std::vector<gpu::TokenRun> runs;
  gpu::AttendJob job;
  job.dims = dims;
  job.k = keys.device(0, &runs);
  job.values = values.front().f;
  job.positions = positions.data();
  job.queries = test.queries;
  job.window = test.window;
  job.soft_cap = test.soft_cap;
  job.scores = scores.data();
  executor->Allow({RangeOf(keys.memory()), RangeOf(runs), RangeOf(values), RangeOf(positions), RangeOf(scores),
                   RangeOf(workspace)});
  executor->Attend(job, workspace.data());
  std::vector<float> expected(dims.tokens);
  Workspace scratch;
  for (uint32_t head = 0; head < dims.heads; ++head) {
    const AttendQueries asked{values.front().f + size_t{head} * test.queries * dims.head_dim, positions.data(), test.queries,
                              test.window, test.soft_cap};
    ScalarBackend()->Attend(dims, keys.source(0), head, asked, &scratch, expected.data());
    const float* got = scores.data() + size_t{head} * dims.tokens;
    for (uint32_t t = 0; t < dims.tokens; ++t) {
      if (std::memcmp(&got[t], &expected[t], sizeof(float)) == 0) continue;
      return "attention to token " + std::to_string(t) + ", head " + std::to_string(head) + ": " + std::to_string(got[t]) +
             ", expected " + std::to_string(expected[t]);
    }
    ++*checks;
  }
  return "";
}

}  // namespace spectrumkv::testing
