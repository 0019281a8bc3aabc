#include "tests/cuda/codec_case.h"

#include <cstring>
#include <memory>

#include "kernels/codec/chunk_head.h"
#include "kernels/cpu/cpu_backends.h"
#include "tests/differential/planes.h"

namespace spectrumkv::testing {
namespace {

constexpr uint8_t kFill = 0xA5;
constexpr ChunkIdentity kIdentity{77, 5, 2, 9, 640, 8};
constexpr size_t kGuardBytes = 64;

// Bytes at a multiple of 16, of exactly this size for the executor, between guards.
class Buffer {
 public:
  Buffer(size_t bytes, uint8_t fill) : bytes_(bytes), memory_(bytes + 2 * kGuardBytes + 16, fill) {
    const size_t start = reinterpret_cast<uintptr_t>(memory_.data()) + kGuardBytes;
    data_ = memory_.data() + kGuardBytes + (16 - start % 16) % 16;
    copy_ = memory_;
  }

  uint8_t* data() { return data_; }
  size_t size() const { return bytes_; }
  shim::Range range() const { return {data_, bytes_}; }
  // Bytes outside are as they were at first.
  bool GuardsIntact() const {
    const size_t begin = static_cast<size_t>(data_ - memory_.data());
    return std::memcmp(memory_.data(), copy_.data(), begin) == 0 &&
           std::memcmp(data_ + bytes_, copy_.data() + begin + bytes_, memory_.size() - begin - bytes_) == 0;
  }
  bool Untouched() const { return memory_ == copy_; }

 private:
  size_t bytes_;
  std::vector<uint8_t> memory_, copy_;
  uint8_t* data_;
};

template <typename T>
shim::Range RangeOf(const std::vector<T>& vector) {
  return {vector.data(), vector.size() * sizeof(T)};
}

class CaseRunner {
 public:
  CaseRunner(const CodecCase& test, Executor* executor, uint64_t* checks)
      : test_(test),
        dims_(test.dims),
        executor_(executor),
        checks_(checks),
        rng_(test.seed),
        source_(dims_, dims_.dtype, test.shape, 0, test.seed),
        workspace_(gpu::WorkspaceBytes(dims_), 0xCD),
        report_(sizeof(gpu::ChunkReport), 0xCD) {
    source_.FillRandomly(&rng_);
    tiers_ = test.tiers.empty() ? RandomTiers(dims_, &rng_) : test.tiers;
  }

  std::string Run() {
    Workspace workspace;
    expected_.resize(MaxChunkBytes(dims_));
    const SourcePlane k = source_.source(0), v = source_.source(1);
    result_ = ScalarBackend()->Encode(dims_, kIdentity, k, dims_.has_v ? &v : nullptr, tiers_.data(), &workspace,
                                      expected_.data(), expected_.size());
    expected_.resize(result_.chunk_bytes);
    std::vector<uint8_t> scrambled = expected_;
    ScrambleChunk(&scrambled, &rng_);
    std::string differs = EncodeExactly();
    if (differs.empty()) differs = EncodeTooLong();
    if (differs.empty()) differs = DecodeAndZero(expected_, "decode");
    if (differs.empty()) differs = DecodeAndZero(scrambled, "decode of a foreign chunk");
    if (differs.empty()) differs = Scan();
    if (differs.empty()) differs = Spread();
    return differs;
  }

 private:
  gpu::EncodeJob JobFor(Buffer* chunk) {
    gpu::EncodeJob job;
    job.dims = dims_;
    job.k = source_.device(0, &runs_[0]);
    if (dims_.has_v) job.v = source_.device(1, &runs_[1]);
    job.tiers = tiers_.data();
    job.chunk = chunk->data();
    job.capacity = chunk->size();
    job.report = reinterpret_cast<gpu::ChunkReport*>(report_.data());
    executor_->Allow({RangeOf(source_.memory()), RangeOf(runs_[0]), RangeOf(runs_[1]), RangeOf(tiers_), chunk->range(),
                      workspace_.range(), report_.range()});
    return job;
  }

  gpu::ChunkReport Report() {
    gpu::ChunkReport report;
    std::memcpy(&report, report_.data(), sizeof(report));
    return report;
  }

  // `what` if not ok; else the check is counted.
  std::string Expect(bool ok, const std::string& what) {
    if (ok) ++*checks_;
    return ok ? "" : what;
  }

  std::string EncodeExactly() {
    Buffer chunk(expected_.size(), kFill);
    const std::vector<uint8_t> before = source_.memory();
    executor_->Encode(JobFor(&chunk), workspace_.data());
    const gpu::ChunkReport report = Report();
    if (report.chunk_bytes != expected_.size()) return "chunk_bytes " + std::to_string(report.chunk_bytes);
    if (report.escaped != result_.escaped) return "escaped " + std::to_string(report.escaped);
    if (report.nonfinite_values != result_.nonfinite_values) return "nonfinite_values";
    for (size_t i = 0; i < kHeaderBytes; ++i) {
      if (chunk.data()[i] != kFill) return "the header was written";
    }
    SealChunk(dims_, kIdentity, report.chunk_bytes, chunk.data());
    size_t at = 0;
    while (at < expected_.size() && chunk.data()[at] == expected_[at]) ++at;
    if (at != expected_.size()) {
      return "encode differs from byte " + std::to_string(at) + " of " + std::to_string(expected_.size());
    }
    return Expect(chunk.GuardsIntact() && workspace_.GuardsIntact() && source_.memory() == before,
                  "encode wrote outside of its buffers");
  }

  std::string EncodeTooLong() {
    Buffer chunk(expected_.size() - 1, kFill);
    executor_->Encode(JobFor(&chunk), workspace_.data());
    return Expect(Report().chunk_bytes == 0 && chunk.Untouched(), "a chunk that does not fit was written");
  }

  std::string DecodeAndZero(const std::vector<uint8_t>& chunk, const std::string& what) {
    ChunkView view;
    if (ParseChunk(chunk.data(), chunk.size(), &view) != Refusal::kNone) return "the scalar chunk is refused";
    PagedPool expected(dims_, test_.target, test_.shape, kFill, test_.seed);
    PagedPool got(dims_, test_.target, test_.shape, kFill, test_.seed);
    // The pools' memory may differ in its alignment to 64 and so in where values lie.
    const TargetPlane k = expected.target(0), v = expected.target(1);
    Workspace workspace;
    const DecodeResult result = ScalarBackend()->Decode(view, test_.target, k, dims_.has_v ? &v : nullptr, &workspace);
    Buffer bytes(chunk.size(), 0);
    std::memcpy(bytes.data(), chunk.data(), chunk.size());
    gpu::DecodeJob job;
    job.dims = dims_;
    job.chunk = bytes.data();
    job.target = test_.target;
    job.k = got.device(0, &runs_[0]);
    if (dims_.has_v) job.v = got.device(1, &runs_[1]);
    job.report = reinterpret_cast<gpu::ChunkReport*>(report_.data());
    executor_->Allow({RangeOf(got.memory()), RangeOf(runs_[0]), RangeOf(runs_[1]), bytes.range(), workspace_.range(),
                      report_.range()});
    executor_->Decode(job, workspace_.data());
    if (Report().rounded_words != result.rounded_words) return what + ": rounded_words";
    if (const std::string differs = Compare(&got, &expected); !differs.empty()) return what + ": " + differs;
    return ZeroTail(&got, &expected);
  }

  std::string ZeroTail(PagedPool* got, PagedPool* expected) {
    const size_t word = SizeOf(test_.target);
    for (int p = 0; p < planes(); ++p) {
      gpu::ZeroJob job;
      job.dims = dims_;
      job.dims.dtype = test_.target;
      job.dims.tokens = got->page_end();
      job.plane = got->device(p, &runs_[p]);
      job.first_token = dims_.tokens;
      executor_->Allow({RangeOf(got->memory()), RangeOf(runs_[p])});
      executor_->Zero(job);
      for (uint32_t t = dims_.tokens; t < got->page_end(); ++t) {
        for (uint32_t h = 0; h < dims_.heads; ++h) {
          for (uint32_t d = 0; d < dims_.head_dim; ++d) std::memset(expected->At(p, t, h, d), 0, word);
        }
      }
    }
    const std::string differs = Compare(got, expected);
    return differs.empty() ? "" : "zeroed tail: " + differs;
  }

  // Every value, and every byte that is none.
  std::string Compare(PagedPool* got, PagedPool* expected) {
    const size_t word = SizeOf(test_.target);
    for (int p = 0; p < planes(); ++p) {
      for (uint32_t t = 0; t < got->page_end(); ++t) {
        for (uint32_t h = 0; h < dims_.heads; ++h) {
          for (uint32_t d = 0; d < dims_.head_dim; ++d) {
            if (std::memcmp(got->At(p, t, h, d), expected->At(p, t, h, d), word) == 0) continue;
            return std::string(p == 0 ? "K" : "V") + " differs at token " + std::to_string(t) + ", head " +
                   std::to_string(h) + ", dim " + std::to_string(d);
          }
        }
      }
    }
    // The same bytes as often as they should be: values are compared above, so the others are intact.
    size_t fills[2] = {0, 0};
    for (uint8_t byte : got->memory()) fills[0] += byte == kFill ? 1 : 0;
    for (uint8_t byte : expected->memory()) fills[1] += byte == kFill ? 1 : 0;
    return Expect(fills[0] == fills[1], "a byte was written that belongs to no value");
  }

  std::string Scan() {
    for (int p = 0; p < planes(); ++p) {
      std::vector<TokenScan> expected(dims_.tokens), got(dims_.tokens);
      ScalarBackend()->Scan(dims_, source_.source(p), expected.data());
      gpu::ScanJob job{dims_, source_.device(p, &runs_[p]), got.data()};
      executor_->Allow({RangeOf(source_.memory()), RangeOf(runs_[p]), RangeOf(got)});
      executor_->Scan(job);
      for (uint32_t t = 0; t < dims_.tokens; ++t) {
        const bool same = got[t].escape == expected[t].escape && got[t].energy_log2 == expected[t].energy_log2;
        if (!same) return "scan of token " + std::to_string(t);
      }
      ++*checks_;
    }
    return "";
  }

  std::string Spread() {
    for (int p = 0; p < planes(); ++p) {
      std::vector<uint8_t> expected(dims_.tokens), got(dims_.tokens);
      const bool centred = p == 0;
      const uint32_t skip = static_cast<uint32_t>(test_.seed % 6);
      Workspace workspace;
      ScalarBackend()->Spread(dims_, source_.source(p), centred, skip, &workspace, expected.data());
      const gpu::SpreadJob job{dims_, source_.device(p, &runs_[p]), centred, skip, got.data()};  // moves the runs
      executor_->Allow({RangeOf(source_.memory()), RangeOf(runs_[p]), RangeOf(got)});
      executor_->Spread(job);
      for (uint32_t t = 0; t < dims_.tokens; ++t) {
        if (got[t] != expected[t]) return "spread of token " + std::to_string(t);
      }
      ++*checks_;
    }
    return "";
  }

  int planes() const { return dims_.has_v ? 2 : 1; }

  const CodecCase& test_;
  const ChunkDims dims_;
  Executor* executor_;
  uint64_t* checks_;
  std::mt19937_64 rng_;
  PagedPool source_;
  std::vector<gpu::TokenRun> runs_[2];
  std::vector<uint8_t> tiers_, expected_;
  EncodeResult result_;
  Buffer workspace_, report_;
};

}  // namespace

std::string NameOf(const CodecCase& test) {
  constexpr const char* kOrders[] = {"NHD", "HND", "dim-strided"};
  const ChunkDims& dims = test.dims;
  return std::string(DTypeName(dims.dtype)) + " to " + DTypeName(test.target) + ", " + std::to_string(dims.tokens) +
         " tokens, " + std::to_string(dims.heads) + " heads, head_dim " + std::to_string(dims.head_dim) +
         (dims.has_v ? "" : ", no V") + ", " + kOrders[static_cast<int>(test.shape.order)] +
         (test.shape.fused ? " fused" : " split") + ", pages of " + std::to_string(test.shape.page_tokens) + ", skip " +
         std::to_string(test.shape.skip) + ", pad " + std::to_string(test.shape.pad_bytes) + ", misaligned by " +
         std::to_string(test.shape.misalignment) + ", seed " + std::to_string(test.seed);
}

std::string RunCodecCase(const CodecCase& test, Executor* executor, uint64_t* checks) {
  return CaseRunner(test, executor, checks).Run();
}

}  // namespace spectrumkv::testing
