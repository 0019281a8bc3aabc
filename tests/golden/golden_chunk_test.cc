// The chunk format against vectors made by an independent implementation (tests/golden/reference.py), both ways, on
// every backend this machine can run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "tests/golden/vector_index.h"

namespace spectrumkv {
namespace {

using golden::ReadFile;
using golden::VectorEntry;

const std::string kFolder = SPECTRUMKV_VECTORS;

const golden::VectorIndex& Index() {
  static const golden::VectorIndex index = golden::ReadVectorIndex(kFolder + "/index.json");
  return index;
}

std::vector<const Backend*> SupportedBackends() {
  static const BackendRegistry registry = [] {
    BackendRegistry r;
    AddCpuBackends(&r);
    return r;
  }();
  std::vector<const Backend*> supported;
  for (const Backend* backend : registry.all()) {
    if (backend->supported()) supported.push_back(backend);
  }
  return supported;
}

ChunkDims DimsOf(const VectorEntry& entry) {
  return ChunkDims{static_cast<uint32_t>(entry.Number("tokens")), static_cast<uint32_t>(entry.Number("heads")),
                   static_cast<uint32_t>(entry.Number("head_dim")), static_cast<DType>(entry.Number("dtype")),
                   entry.Flag("v_present")};
}

ChunkIdentity IdentityOf(const VectorEntry& entry) {
  ChunkIdentity identity;
  identity.fence = entry.Number("fence");
  identity.chunk_index = static_cast<uint32_t>(entry.Number("chunk_index"));
  identity.group = static_cast<uint16_t>(entry.Number("group"));
  identity.layer = static_cast<uint16_t>(entry.Number("layer"));
  identity.token_first = static_cast<uint32_t>(entry.Number("token_first"));
  identity.head_first = static_cast<uint16_t>(entry.Number("head_first"));
  return identity;
}

// Addresses of the tokens of a dense [tokens, heads, head_dim] plane.
template <typename Byte>
std::vector<Byte*> Rows(Byte* data, const ChunkDims& dims) {
  std::vector<Byte*> rows;
  for (uint32_t t = 0; t < dims.tokens; ++t) {
    rows.push_back(data + size_t{t} * dims.heads * dims.head_dim * SizeOf(dims.dtype));
  }
  return rows;
}

void ExpectDecodes(const Backend& backend, const std::vector<uint8_t>& chunk, const std::vector<uint8_t>& expected,
                   const ChunkDims& dims) {
  ChunkView view;
  ASSERT_EQ(ParseChunk(chunk.data(), chunk.size(), &view), Refusal::kNone);
  EXPECT_EQ(view.dims.tokens, dims.tokens);
  EXPECT_EQ(view.dims.heads, dims.heads);
  EXPECT_EQ(view.dims.head_dim, dims.head_dim);
  EXPECT_EQ(view.dims.dtype, dims.dtype);
  EXPECT_EQ(view.dims.has_v, dims.has_v);
  ASSERT_EQ(expected.size(), KvBytes(dims));

  std::vector<uint8_t> words(expected.size(), 0xA5);
  const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype));
  const std::vector<uint8_t*> k_rows = Rows(words.data(), dims);
  const std::vector<uint8_t*> v_rows = Rows(words.data() + words.size() / 2, dims);
  const TargetPlane k{k_rows.data(), word * dims.head_dim, word};
  const TargetPlane v{v_rows.data(), word * dims.head_dim, word};
  Workspace workspace;
  const DecodeResult result = backend.Decode(view, dims.dtype, k, dims.has_v ? &v : nullptr, &workspace);
  EXPECT_EQ(result.rounded_words, 0u);
  EXPECT_TRUE(words == expected) << "decoded words differ";
}

TEST(GoldenChunkTest, IndexIsComplete) {
  EXPECT_EQ(Index().at("cases").size(), 60u);
  EXPECT_EQ(Index().at("decode_only").size(), 8u);
  EXPECT_EQ(Index().at("must_fail").size(), 37u);
  for (const Backend* backend : SupportedBackends()) std::printf("backend under test: %s\n", backend->name());
}

TEST(GoldenChunkTest, EncodesToTheExactBytes) {
  for (const Backend* backend : SupportedBackends()) {
    for (const VectorEntry& entry : Index().at("cases")) {
      const std::string& name = entry.Text("name");
      SCOPED_TRACE(std::string(backend->name()) + " " + name);
      const ChunkDims dims = DimsOf(entry);
      const std::vector<uint8_t> in = ReadFile(kFolder + "/" + name + ".in");
      const std::vector<uint8_t> tiers = ReadFile(kFolder + "/" + name + ".tiers");
      const std::vector<uint8_t> expected = ReadFile(kFolder + "/" + name + ".chunk");
      ASSERT_EQ(in.size(), KvBytes(dims));
      const int64_t word = static_cast<int64_t>(SizeOf(dims.dtype));
      const std::vector<const uint8_t*> k_rows = Rows(in.data(), dims), v_rows = Rows(in.data() + in.size() / 2, dims);
      const SourcePlane k{k_rows.data(), word * dims.head_dim, word}, v{v_rows.data(), word * dims.head_dim, word};
      Workspace workspace;
      std::vector<uint8_t> out(MaxChunkBytes(dims), 0xA5);
      const EncodeResult result = backend->Encode(dims, IdentityOf(entry), k, dims.has_v ? &v : nullptr, tiers.data(),
                                                  &workspace, out.data(), out.size());
      ASSERT_EQ(result.chunk_bytes, expected.size());
      EXPECT_EQ(result.escaped, entry.Number("escaped_tokens"));
      out.resize(result.chunk_bytes);
      EXPECT_TRUE(out == expected) << "chunk bytes differ";
    }
  }
}

TEST(GoldenChunkTest, DecodesToTheExactWords) {
  for (const Backend* backend : SupportedBackends()) {
    for (const char* list : {"cases", "decode_only"}) {
      for (const VectorEntry& entry : Index().at(list)) {
        const std::string& name = entry.Text("name");
        SCOPED_TRACE(std::string(backend->name()) + " " + name);
        ExpectDecodes(*backend, ReadFile(kFolder + "/" + name + ".chunk"), ReadFile(kFolder + "/" + name + ".out"),
                      DimsOf(entry));
      }
    }
  }
}

TEST(GoldenChunkTest, RefusesWithTheReason) {
  for (const VectorEntry& entry : Index().at("must_fail")) {
    const std::string& name = entry.Text("name");
    const std::vector<uint8_t> chunk = ReadFile(kFolder + "/must_fail/" + name + ".chunk");
    ChunkView view;
    view.dims.tokens = 12345;
    EXPECT_EQ(RefusalName(ParseChunk(chunk.data(), chunk.size(), &view)), entry.Text("reason")) << name;
    EXPECT_EQ(view.dims.tokens, 12345u) << name << ": a refused chunk must not touch the view";
  }
}

TEST(GoldenChunkTest, HeaderFieldsArrive) {
  for (const VectorEntry& entry : Index().at("cases")) {
    const std::vector<uint8_t> chunk = ReadFile(kFolder + "/" + entry.Text("name") + ".chunk");
    ChunkView view;
    ASSERT_EQ(ParseChunk(chunk.data(), chunk.size(), &view), Refusal::kNone);
    const ChunkIdentity identity = IdentityOf(entry);
    EXPECT_EQ(view.header.fence, identity.fence);
    EXPECT_EQ(view.header.chunk_index, identity.chunk_index);
    EXPECT_EQ(view.header.group, identity.group);
    EXPECT_EQ(view.header.layer, identity.layer);
    EXPECT_EQ(view.header.token_first, identity.token_first);
    EXPECT_EQ(view.header.head_first, identity.head_first);
  }
}

}  // namespace
}  // namespace spectrumkv
