// Any bytes as a chunk: ParseChunk refuses them or every backend decodes them, reading and writing nothing outside its
// buffers and giving the same words. The input is copied to a buffer of its exact size, so that AddressSanitizer sees a
// read too far. Its checksum is put right before, or no mutation would pass it; the last byte says whether.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_backends.h"
#include "kernels/format/crc32c.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kMaxValues = 1 << 20;  // keeps the output of one input to some MiB
constexpr uint8_t kFill = 0x5A;
constexpr size_t kGuard = 32;

void Check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

// Planes of a decoded chunk, dense, each between guard bytes.
struct Output {
  std::vector<uint8_t> k, v;
  DecodeResult result;
};

Output Decode(const Backend& backend, const ChunkView& view, DType target) {
  const ChunkDims& dims = view.dims;
  const int64_t word = static_cast<int64_t>(SizeOf(target)), head = word * dims.head_dim;
  const size_t token_bytes = static_cast<size_t>(head) * dims.heads;
  Output out;
  std::vector<uint8_t*> rows[2];
  for (int plane = 0; plane < (dims.has_v ? 2 : 1); ++plane) {
    std::vector<uint8_t>& bytes = plane == 0 ? out.k : out.v;
    bytes.assign(dims.tokens * token_bytes + 2 * kGuard, kFill);
    for (uint32_t t = 0; t < dims.tokens; ++t) rows[plane].push_back(bytes.data() + kGuard + t * token_bytes);
  }
  const TargetPlane k{rows[0].data(), head, word}, v{rows[1].data(), head, word};
  Workspace workspace;
  out.result = backend.Decode(view, target, k, dims.has_v ? &v : nullptr, &workspace);
  for (const std::vector<uint8_t>* bytes : {&out.k, &out.v}) {
    for (size_t i = 0; i < kGuard && !bytes->empty(); ++i) {
      Check((*bytes)[i] == kFill && (*bytes)[bytes->size() - 1 - i] == kFill, "nothing is written outside the planes");
    }
  }
  return out;
}

void Run(const uint8_t* data, size_t size) {
  ChunkView view;
  if (ParseChunk(data, size, &view) != Refusal::kNone) return;
  Check(view.layout.chunk_bytes == size, "an accepted chunk has the length its tier map gives");
  if (KvBytes(view.dims) / SizeOf(view.dims.dtype) > kMaxValues) return;
  const DType target = static_cast<DType>(1 + data[size / 2] % 3);
  const Output expected = Decode(*ScalarBackend(), view, target);
  for (const Backend* backend : {Avx2Backend(), Avx512Backend()}) {
    if (!backend->supported()) continue;
    const Output got = Decode(*backend, view, target);
    Check(got.k == expected.k && got.v == expected.v, "backends decode the same words");
    Check(got.result.rounded_words == expected.result.rounded_words, "backends count the same rounded words");
  }
}

}  // namespace
}  // namespace spectrumkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace spectrumkv;
  // Exactly `size` bytes: a vector's spare capacity would hide a read past the end.
  const std::unique_ptr<uint8_t[]> bytes(new uint8_t[size]);
  if (size != 0) std::memcpy(bytes.get(), data, size);
  if (size >= kHeaderBytes && bytes[size - 1] % 4 != 3) {
    uint32_t body_bytes = static_cast<uint32_t>(size - kHeaderBytes);
    if (bytes[size - 1] % 4 != 2) std::memcpy(bytes.get() + offsetof(ChunkHeader, body_bytes), &body_bytes, 4);
    uint32_t crc = Crc32c(0, bytes.get(), offsetof(ChunkHeader, crc32c));
    crc = Crc32c(crc, bytes.get() + kHeaderBytes, body_bytes);
    std::memcpy(bytes.get() + offsetof(ChunkHeader, crc32c), &crc, sizeof(crc));
  }
  Run(bytes.get(), size);
  return 0;
}
