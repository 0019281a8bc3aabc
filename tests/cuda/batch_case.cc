#include "tests/cuda/batch_case.h"

#include <cstring>
#include <memory>

#include "kernels/codec/chunk_head.h"
#include "kernels/cpu/cpu_backends.h"
#include "tests/cuda/paged_pool.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

constexpr ChunkIdentity kIdentity{77, 5, 2, 9, 640, 8};

struct alignas(16) Word {
  uint8_t bytes[16];
};
using Words = std::vector<Word>;

uint8_t* BytesOf(Words* words) { return words->front().bytes; }
size_t WordsFor(size_t bytes) { return (bytes + sizeof(Word) - 1) / sizeof(Word); }

template <typename T>
shim::Range RangeOf(const std::vector<T>& vector) {
  return {vector.data(), vector.size() * sizeof(T)};
}

struct BatchedChunk {
  BatchedChunk(const ChunkDims& d, uint64_t seed, std::mt19937_64* rng)
      : dims(d), source(d, d.dtype, {}, 0, seed), got(d, d.dtype, {}, 0xA5, seed), expected(d, d.dtype, {}, 0xA5, seed) {
    source.FillRandomly(rng);
    tiers = RandomTiers(dims, rng);
    bytes.resize(MaxChunkBytes(dims));
    Workspace workspace;
    const SourcePlane k = source.source(0), v = source.source(1);
    const EncodeResult result = ScalarBackend()->Encode(dims, kIdentity, k, dims.has_v ? &v : nullptr, tiers.data(),
                                                        &workspace, bytes.data(), bytes.size());
    bytes.resize(result.chunk_bytes);
    chunk.assign(WordsFor(bytes.size()), Word{});
    ChunkView view;
    if (ParseChunk(bytes.data(), bytes.size(), &view) != Refusal::kNone) return;
    const TargetPlane to_k = expected.target(0), to_v = expected.target(1);
    ScalarBackend()->Decode(view, dims.dtype, to_k, dims.has_v ? &to_v : nullptr, &workspace);
  }

  void Allow(std::vector<shim::Range>* memory) {
    for (const shim::Range& range : {RangeOf(source.memory()), RangeOf(got.memory()), RangeOf(runs[0]), RangeOf(runs[1]),
                                     RangeOf(tiers), RangeOf(chunk), shim::Range{&report, sizeof(report)}}) {
      memory->push_back(range);
    }
  }

  ChunkDims dims;
  PagedPool source, got, expected;
  std::vector<uint8_t> tiers, bytes;
  Words chunk;
  std::vector<gpu::TokenRun> runs[2];
  gpu::ChunkReport report;
};

gpu::EncodeJob EncodeOf(BatchedChunk* of, size_t room) {
  gpu::EncodeJob job;
  job.dims = of->dims;
  job.k = of->source.device(0, &of->runs[0]);
  if (of->dims.has_v) job.v = of->source.device(1, &of->runs[1]);
  job.tiers = of->tiers.data();
  job.chunk = BytesOf(&of->chunk);
  job.capacity = room;
  job.report = &of->report;
  return job;
}

gpu::DecodeJob DecodeOf(BatchedChunk* of) {
  gpu::DecodeJob job;
  job.dims = of->dims;
  job.chunk = BytesOf(&of->chunk);
  job.target = of->dims.dtype;
  job.k = of->got.device(0, &of->runs[0]);
  if (of->dims.has_v) job.v = of->got.device(1, &of->runs[1]);
  job.report = &of->report;
  return job;
}

// Both planes of every chunk in one launch of each.
std::string ScanTogether(const std::vector<std::unique_ptr<BatchedChunk>>& chunks, Executor* executor, uint64_t* checks) {
  struct Found {
    std::vector<TokenScan> scans, expected_scans;
    std::vector<uint8_t> spreads, expected_spreads;
  };
  std::vector<Found> found(2 * chunks.size());
  std::vector<gpu::ScanJob> scans;
  std::vector<gpu::SpreadJob> spreads;
  std::vector<shim::Range> memory;
  for (size_t i = 0; i < found.size(); ++i) {
    BatchedChunk& of = *chunks[i / 2];
    const int p = static_cast<int>(i % 2);
    if (p == 1 && !of.dims.has_v) continue;
    Found& mine = found[i];
    for (auto* tokens : {&mine.scans, &mine.expected_scans}) tokens->resize(of.dims.tokens);
    for (auto* tokens : {&mine.spreads, &mine.expected_spreads}) tokens->resize(of.dims.tokens);
    const uint32_t skip = static_cast<uint32_t>(i % 4);
    Workspace workspace;
    ScalarBackend()->Scan(of.dims, of.source.source(p), mine.expected_scans.data());
    ScalarBackend()->Spread(of.dims, of.source.source(p), p == 0, skip, &workspace, mine.expected_spreads.data());
    const gpu::DevicePlane plane = of.source.device(p, &of.runs[p]);
    scans.push_back({of.dims, plane, mine.scans.data()});
    spreads.push_back({of.dims, plane, p == 0, skip, mine.spreads.data()});
    for (const shim::Range& range : {RangeOf(of.source.memory()), RangeOf(of.runs[p]), RangeOf(mine.scans),
                                     RangeOf(mine.spreads)}) {
      memory.push_back(range);
    }
  }
  executor->Allow(std::move(memory));
  executor->ScanBatch(scans.data(), static_cast<uint32_t>(scans.size()));
  executor->SpreadBatch(spreads.data(), static_cast<uint32_t>(spreads.size()));
  for (size_t i = 0; i < found.size(); ++i) {
    const Found& mine = found[i];
    const std::string name = std::string(i % 2 == 0 ? "K" : "V") + " of chunk " + std::to_string(i / 2);
    for (size_t t = 0; t < mine.scans.size(); ++t) {
      const TokenScan &got = mine.scans[t], &expected = mine.expected_scans[t];
      if (got.escape != expected.escape || got.energy_log2 != expected.energy_log2) return name + ": scan";
    }
    if (mine.spreads != mine.expected_spreads) return name + ": spread";
    *checks += mine.scans.empty() ? 0 : 2;
  }
  return "";
}

}  // namespace

std::vector<ChunkDims> BatchDims(DType dtype, uint32_t head_dim) {
  return {{9, 2, head_dim, dtype, true}, {3, 1, head_dim, dtype, false}, {17, 1, head_dim, dtype, true}};
}

std::string RunBatchCase(const std::vector<ChunkDims>& dims, uint64_t seed, Executor* executor, uint64_t* checks) {
  std::mt19937_64 rng(seed);
  std::vector<std::unique_ptr<BatchedChunk>> chunks;
  size_t workspace_bytes = 0;
  for (const ChunkDims& of : dims) {
    chunks.push_back(std::make_unique<BatchedChunk>(of, seed + chunks.size(), &rng));
    workspace_bytes += gpu::WorkspaceBytes(of);
  }
  Words workspace(WordsFor(workspace_bytes), Word{});
  const size_t small = seed % chunks.size();
  std::vector<gpu::EncodeJob> encodes;
  std::vector<shim::Range> memory = {RangeOf(workspace)};
  for (size_t i = 0; i < chunks.size(); ++i) {
    encodes.push_back(EncodeOf(chunks[i].get(), chunks[i]->bytes.size() - (i == small ? 1 : 0)));
    chunks[i]->Allow(&memory);
  }
  executor->Allow(std::move(memory));
  const auto count = static_cast<uint32_t>(chunks.size());
  executor->EncodeBatch(encodes.data(), count, BytesOf(&workspace));
  for (size_t i = 0; i < chunks.size(); ++i) {
    BatchedChunk& of = *chunks[i];
    const std::string name = "chunk " + std::to_string(i);
    if (of.report.chunk_bytes != (i == small ? 0 : of.bytes.size())) return name + ": chunk_bytes";
    if (i == small) {
      std::memcpy(BytesOf(&of.chunk), of.bytes.data(), of.bytes.size());  // to be decoded
      continue;
    }
    SealChunk(of.dims, kIdentity, of.report.chunk_bytes, BytesOf(&of.chunk));
    if (std::memcmp(BytesOf(&of.chunk), of.bytes.data(), of.bytes.size()) != 0) return name + " differs";
    ++*checks;
  }
  std::vector<gpu::DecodeJob> decodes;
  memory = {RangeOf(workspace)};
  for (const auto& of : chunks) {
    decodes.push_back(DecodeOf(of.get()));
    of->Allow(&memory);
  }
  executor->Allow(std::move(memory));
  executor->DecodeBatch(decodes.data(), count, BytesOf(&workspace));
  for (size_t i = 0; i < chunks.size(); ++i) {
    BatchedChunk& of = *chunks[i];
    for (int p = 0; p < (of.dims.has_v ? 2 : 1); ++p) {
      for (uint32_t t = 0; t < of.dims.tokens; ++t) {
        for (uint32_t h = 0; h < of.dims.heads; ++h) {
          const size_t cell = of.dims.head_dim * SizeOf(of.dims.dtype);
          if (std::memcmp(of.got.At(p, t, h, 0), of.expected.At(p, t, h, 0), cell) == 0) continue;
          return "chunk " + std::to_string(i) + " decodes to others at token " + std::to_string(t);
        }
      }
    }
    ++*checks;
  }
  return ScanTogether(chunks, executor, checks);
}

}  // namespace spectrumkv::testing
