#include "tests/bench/codec_bench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernels/codec/codec_math.h"
#include "kernels/cpu/cpu_backends.h"
#include "tests/bench/device_bench.h"

namespace spectrumkv {
namespace bench {
namespace {

constexpr Tier kTiers[] = {Tier::kRaw, Tier::kP8, Tier::kP4, Tier::kQ8, Tier::kQ4, Tier::kQ3, Tier::kQ2};

// One plane of some chunks: a flat array and the address of each token.
struct Values {
  std::vector<uint8_t> memory;
  std::vector<uint8_t*> rows;

  Values(uint64_t tokens, uint64_t token_bytes) : memory(tokens * token_bytes), rows(tokens) {
    for (uint64_t t = 0; t < tokens; ++t) rows[t] = memory.data() + t * token_bytes;
  }
};

// Random values for one chunk's worth of tokens, repeated; `offset`: how far channels lie from zero.
void FillValues(Values* values, const CodecCase& c, uint64_t chunk_tokens, float offset) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> centre(c.head_dim);
  for (float& x : centre) x = offset * normal(rng);
  const uint64_t token_bytes = values->memory.size() / values->rows.size();
  const size_t word = SizeOf(c.dtype);
  for (uint64_t i = 0; i < chunk_tokens * token_bytes / word; ++i) {
    const float x = centre[i % c.head_dim] + normal(rng);
    const uint32_t bits = c.dtype == DType::kFloat16    ? NarrowHalf(x)
                          : c.dtype == DType::kBFloat16 ? NarrowBfloat(x)
                                                        : FloatBits(x);
    std::memcpy(values->memory.data() + i * word, &bits, word);
  }
  const uint64_t chunk_bytes = chunk_tokens * token_bytes;
  for (uint64_t at = chunk_bytes; at < values->memory.size(); at += chunk_bytes) {
    std::memcpy(values->memory.data() + at, values->memory.data(), chunk_bytes);
  }
}

}  // namespace

std::vector<uint8_t> BenchPlane(const CodecCase& c, uint64_t chunks, uint64_t chunk_tokens, float offset) {
  Values values(chunks * chunk_tokens, uint64_t{c.heads} * c.head_dim * SizeOf(c.dtype));
  FillValues(&values, c, chunk_tokens, offset);
  return std::move(values.memory);
}

CodecFigures MeasureCodec(const CodecCase& c) {
  ChunkDims dims{TokensPerChunk(c.heads, c.head_dim, c.dtype, true), c.heads, c.head_dim, c.dtype, true};
  const uint64_t chunks = std::max<uint64_t>(1, c.kv_bytes / KvBytes(dims));
  const uint64_t tokens = chunks * dims.tokens;
  const int64_t word = static_cast<int64_t>(SizeOf(c.dtype)), head = word * c.head_dim;
  const uint64_t token_bytes = static_cast<uint64_t>(head) * c.heads;
  Values k(tokens, token_bytes), v(tokens, token_bytes), k_back(tokens, token_bytes), v_back(tokens, token_bytes);
  FillValues(&k, c, dims.tokens, 2.0f);
  FillValues(&v, c, dims.tokens, 0.0f);
  const std::vector<uint8_t> tiers(dims.tokens, TierMapByte(c.tier, c.tier));
  Workspace workspace;

  TierCounts counts;
  counts.k[static_cast<int>(c.tier)] = counts.v[static_cast<int>(c.tier)] = dims.tokens;
  const uint64_t chunk_bytes = ChunkBytes(dims, counts);
  std::vector<uint8_t> wire(chunks * chunk_bytes);
  const auto encode = [&] {
    for (uint64_t i = 0; i < chunks; ++i) {
      const SourcePlane k_plane{k.rows.data() + i * dims.tokens, head, word};
      const SourcePlane v_plane{v.rows.data() + i * dims.tokens, head, word};
      const EncodeResult result = c.backend->Encode(dims, {}, k_plane, &v_plane, tiers.data(), &workspace,
                                                    wire.data() + i * chunk_bytes, chunk_bytes);
      if (result.chunk_bytes != chunk_bytes) std::abort();
    }
  };
  encode();
  std::vector<ChunkView> views(chunks);
  for (uint64_t i = 0; i < chunks; ++i) {
    if (ParseChunk(wire.data() + i * chunk_bytes, chunk_bytes, &views[i]) != Refusal::kNone) std::abort();
  }
  std::vector<TokenScan> scans(dims.tokens);

  const double gb = static_cast<double>(chunks * KvBytes(dims)) * 1e-9;
  CodecFigures figures;
  figures.wire_ratio = static_cast<double>(chunk_bytes) / static_cast<double>(KvBytes(dims));
  figures.encode_gbs = gb / BestSeconds(c.budget_s, encode);
  figures.decode_gbs = gb / BestSeconds(c.budget_s, [&] {
    for (uint64_t i = 0; i < chunks; ++i) {
      const TargetPlane k_plane{k_back.rows.data() + i * dims.tokens, head, word};
      const TargetPlane v_plane{v_back.rows.data() + i * dims.tokens, head, word};
      c.backend->Decode(views[i], c.dtype, k_plane, &v_plane, &workspace);
    }
  });
  figures.scan_gbs = gb / BestSeconds(c.budget_s, [&] {
    for (uint64_t i = 0; i < chunks; ++i) {
      c.backend->Scan(dims, SourcePlane{k.rows.data() + i * dims.tokens, head, word}, scans.data());
      c.backend->Scan(dims, SourcePlane{v.rows.data() + i * dims.tokens, head, word}, scans.data());
    }
  });
  return figures;
}

namespace {

struct Options {
  std::string backend, tier;
  std::vector<uint32_t> head_dims = {64, 128};
  std::vector<DType> dtypes = {DType::kFloat16, DType::kBFloat16};
  std::vector<uint64_t> kv_mib = {1, 256};
  double budget_s = 0.1;
  bool json = false;
};

constexpr char kHelp[] =
    "usage: spectrumkv_bench codec [--backend NAME] [--tier NAME] [--head-dim N] [--dtype float16|bfloat16|float32]\n"
    "                              [--mib N] [--budget SECONDS] [--json] [--smoke]\n"
    "One core; GB/s (1e9) of raw KV by CPU time, best run. 1 MiB stays in cache, 256 MiB does not.\n";

// False where an option is unknown or lacks its value.
bool ParseOptions(int argc, char** argv, Options* options) {
  for (int i = 0; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--json") {
      options->json = true;
      continue;
    }
    if (name == "--smoke") {
      options->head_dims = {64};
      options->dtypes = {DType::kFloat16};
      options->kv_mib = {1};
      options->budget_s = 0.002;
      continue;
    }
    if (i + 1 == argc) return false;
    const std::string value = argv[++i];
    if (name == "--backend") {
      options->backend = value;
    } else if (name == "--tier") {
      options->tier = value;
    } else if (name == "--head-dim") {
      options->head_dims = {static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10))};
      if (options->head_dims[0] < 8 || options->head_dims[0] > 1024 || options->head_dims[0] % 8 != 0) return false;
    } else if (name == "--dtype") {
      options->dtypes.clear();
      for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
        if (value == DTypeName(dtype)) options->dtypes = {dtype};
      }
      if (options->dtypes.empty()) return false;
    } else if (name == "--mib") {
      options->kv_mib = {std::strtoull(value.c_str(), nullptr, 10)};
      if (options->kv_mib[0] < 1 || options->kv_mib[0] > 8192) return false;
    } else if (name == "--budget") {
      options->budget_s = std::strtod(value.c_str(), nullptr);
    } else {
      return false;
    }
  }
  return true;
}

void PrintLimits(const MemoryLimits& limits, uint64_t mib, bool json) {
  if (json) {
    std::printf("{\"kind\": \"limits\", \"mib\": %llu, \"memcpy_gbs\": %.3f, \"read_gbs\": %.3f, "
                "\"read2_write1_gbs\": %.3f, \"read1_write2_gbs\": %.3f, \"crc32c_gbs\": %.3f}\n",
                static_cast<unsigned long long>(mib), limits.memcpy_gbs, limits.read_gbs, limits.read2_write1_gbs,
                limits.read1_write2_gbs, limits.crc32c_gbs);
    return;
  }
  std::printf("\n%llu MiB: memcpy %.1f, read %.1f, read 2 write 1 %.1f, read 1 write 2 %.1f, crc32c %.1f GB/s\n",
              static_cast<unsigned long long>(mib), limits.memcpy_gbs, limits.read_gbs, limits.read2_write1_gbs,
              limits.read1_write2_gbs, limits.crc32c_gbs);
  std::printf("%-8s %-9s %5s %-4s %6s | %8s %8s | %8s %8s | %6s\n", "backend", "dtype", "dim", "tier", "wire", "encode",
              "of limit", "decode", "of limit", "scan");
}

void PrintFigures(const CodecCase& c, const CodecFigures& figures, const MemoryLimits& limits, uint64_t mib, bool json) {
  const bool raw = c.tier == Tier::kRaw;
  const double encode_limit = raw ? limits.memcpy_gbs : limits.read2_write1_gbs;
  const double decode_limit = raw ? limits.memcpy_gbs : limits.read1_write2_gbs;
  if (json) {
    std::printf("{\"kind\": \"codec\", \"mib\": %llu, \"backend\": \"%s\", \"dtype\": \"%s\", \"head_dim\": %u, "
                "\"tier\": \"%s\", \"wire_ratio\": %.4f, \"encode_gbs\": %.3f, \"encode_of_limit\": %.3f, "
                "\"decode_gbs\": %.3f, \"decode_of_limit\": %.3f, \"scan_gbs\": %.3f}\n",
                static_cast<unsigned long long>(mib), c.backend->name(), DTypeName(c.dtype), c.head_dim,
                TierName(c.tier), figures.wire_ratio, figures.encode_gbs, figures.encode_gbs / encode_limit,
                figures.decode_gbs, figures.decode_gbs / decode_limit, figures.scan_gbs);
    return;
  }
  std::printf("%-8s %-9s %5u %-4s %6.3f | %8.2f %8.2f | %8.2f %8.2f | %6.1f\n", c.backend->name(), DTypeName(c.dtype),
              c.head_dim, TierName(c.tier), figures.wire_ratio, figures.encode_gbs, figures.encode_gbs / encode_limit,
              figures.decode_gbs, figures.decode_gbs / decode_limit, figures.scan_gbs);
}

void RunSize(const Options& options, uint64_t mib, const std::vector<const Backend*>& backends) {
  const MemoryLimits limits = MeasureMemoryLimits(mib << 20, options.budget_s);
  PrintLimits(limits, mib, options.json);
  for (const Backend* backend : backends) {
    const bool slow = backend == ScalarBackend();
    for (DType dtype : options.dtypes) {
      for (uint32_t head_dim : options.head_dims) {
        for (Tier tier : kTiers) {
          if (!options.tier.empty() && options.tier != TierName(tier)) continue;
          CodecCase c{backend, tier, dtype, 8, head_dim, mib << 20, options.budget_s};
          if (slow) c.kv_bytes = std::min<uint64_t>(c.kv_bytes, 8 << 20);  // it is nowhere near memory's speed
          PrintFigures(c, MeasureCodec(c), limits, mib, options.json);
          std::fflush(stdout);
        }
      }
    }
  }
}

}  // namespace
}  // namespace bench

int RunCodecBench(int argc, char** argv) {
  bench::Options options;
  if (argc == 1 && std::strcmp(argv[0], "--help") == 0) {
    std::printf("%s", bench::kHelp);
    return 0;
  }
  if (!bench::ParseOptions(argc, argv, &options)) {
    std::fprintf(stderr, "%s", bench::kHelp);
    return 2;
  }
  if (options.backend == "cuda") {
    return bench::RunDeviceBench({options.tier, options.head_dims, options.dtypes, options.kv_mib, options.budget_s,
                                  options.json},
                                 gpu::CudaRuntime());
  }
  BackendRegistry registry;
  AddCpuBackends(&registry);
  std::vector<const Backend*> backends;
  for (const Backend* backend : registry.all()) {
    if (!options.backend.empty() && options.backend != backend->name()) continue;
    if (!backend->supported()) {
      std::fprintf(stderr, "SKIPPED: this machine cannot run %s\n", backend->name());
      continue;
    }
    std::string detail;
    if (!SelfTest(*backend, &detail)) {
      std::fprintf(stderr, "self-test failed: %s\n", detail.c_str());
      return 1;
    }
    backends.push_back(backend);
  }
  if (backends.empty()) {
    std::fprintf(stderr, "no backend to measure\n");
    return 2;
  }
  for (uint64_t mib : options.kv_mib) bench::RunSize(options, mib, backends);
  return 0;
}

}  // namespace spectrumkv
