// The committed chunks (tests/golden) through the kernels on the shim: the exact bytes, and the exact words.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "kernels/codec/chunk_head.h"
#include "tests/cuda/shim_executor.h"
#include "tests/golden/vector_index.h"

namespace spectrumkv::testing {
namespace {

using golden::ReadFile;
using golden::VectorEntry;

const std::string kFolder = SPECTRUMKV_VECTORS;

const golden::VectorIndex& Index() {
  static const golden::VectorIndex index = golden::ReadVectorIndex(kFolder + "/index.json");
  return index;
}

ChunkDims DimsOf(const VectorEntry& entry) {
  return ChunkDims{static_cast<uint32_t>(entry.Number("tokens")), static_cast<uint32_t>(entry.Number("heads")),
                   static_cast<uint32_t>(entry.Number("head_dim")), static_cast<DType>(entry.Number("dtype")),
                   entry.Flag("v_present")};
}

// 16-byte aligned memory of the size asked for.
struct Bytes {
  explicit Bytes(size_t bytes) : size(bytes), words((bytes + 15) / 16) {}
  uint8_t* data() { return reinterpret_cast<uint8_t*>(words.data()); }
  size_t size;
  struct alignas(16) Word {
    uint8_t bytes[16] = {};
  };
  std::vector<Word> words;
};

// A dense [tokens, heads, head_dim] plane: one run.
const gpu::TokenRun kOneRun{};
gpu::DevicePlane Dense(uint8_t* base, const ChunkDims& dims) {
  const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype)), head = word * dims.head_dim;
  return gpu::DevicePlane{base, &kOneRun, 1, head * dims.heads, head, word};
}

std::unique_ptr<Executor> NextExecutor() {
  static unsigned count = 0;
  ++count;
  return MakeShimExecutor(static_cast<shim::Order>(count % 3), count);
}

TEST(CudaGoldenTest, EncodesToTheExactBytes) {
  for (const VectorEntry& entry : Index().at("cases")) {
    SCOPED_TRACE(entry.Text("name"));
    const ChunkDims dims = DimsOf(entry);
    std::vector<uint8_t> in = ReadFile(kFolder + "/" + entry.Text("name") + ".in");
    const std::vector<uint8_t> tiers = ReadFile(kFolder + "/" + entry.Text("name") + ".tiers");
    const std::vector<uint8_t> expected = ReadFile(kFolder + "/" + entry.Text("name") + ".chunk");
    Bytes chunk(MaxChunkBytes(dims)), workspace(gpu::WorkspaceBytes(dims));
    gpu::ChunkReport report;
    gpu::EncodeJob job{dims,         Dense(in.data(), dims), Dense(in.data() + in.size() / 2, dims),
                       tiers.data(), chunk.data(),           chunk.size,
                       &report};
    NextExecutor()->Encode(job, workspace.data());
    ASSERT_EQ(report.chunk_bytes, expected.size());
    EXPECT_EQ(report.escaped, entry.Number("escaped_tokens"));
    const ChunkIdentity identity{entry.Number("fence"),
                                 static_cast<uint32_t>(entry.Number("chunk_index")),
                                 static_cast<uint16_t>(entry.Number("group")),
                                 static_cast<uint16_t>(entry.Number("layer")),
                                 static_cast<uint32_t>(entry.Number("token_first")),
                                 static_cast<uint16_t>(entry.Number("head_first"))};
    SealChunk(dims, identity, report.chunk_bytes, chunk.data());
    EXPECT_EQ(std::memcmp(chunk.data(), expected.data(), expected.size()), 0);
  }
}

TEST(CudaGoldenTest, DecodesToTheExactWords) {
  size_t decoded = 0;
  for (const char* list : {"cases", "decode_only"}) {
    for (const VectorEntry& entry : Index().at(list)) {
      SCOPED_TRACE(entry.Text("name"));
      const ChunkDims dims = DimsOf(entry);
      const std::vector<uint8_t> coded = ReadFile(kFolder + "/" + entry.Text("name") + ".chunk");
      const std::vector<uint8_t> expected = ReadFile(kFolder + "/" + entry.Text("name") + ".out");
      Bytes chunk(coded.size()), out(expected.size()), workspace(gpu::WorkspaceBytes(dims));
      std::memcpy(chunk.data(), coded.data(), coded.size());
      gpu::ChunkReport report;
      gpu::DecodeJob job{
          dims, chunk.data(), dims.dtype, Dense(out.data(), dims), Dense(out.data() + out.size / 2, dims), &report};
      NextExecutor()->Decode(job, workspace.data());
      EXPECT_EQ(report.rounded_words, 0u);
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), expected.size()), 0);
      ++decoded;
    }
  }
  EXPECT_EQ(decoded, 68u);
}

}  // namespace
}  // namespace spectrumkv::testing
