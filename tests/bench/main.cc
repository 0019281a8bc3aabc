// spectrumkv_bench: programs that print figures. Each subcommand is one file of this folder.
#include <cstdio>
#include <cstring>

#include "tests/bench/codec_bench.h"
#if defined(SPECTRUMKV_BENCH_PLAN)
#include "tests/bench/plan_bench.h"
#endif
#if defined(SPECTRUMKV_BENCH_STREAM)
#include "tests/bench/stream_bench.h"
#endif
#if defined(SPECTRUMKV_BENCH_E2E)
#include "tests/bench/e2e_bench.h"
#include "tests/bench/latency_bench.h"
#include "tests/bench/refine_bench.h"
#include "tests/bench/scale_bench.h"
#endif

namespace {

struct Subcommand {
  const char* name;
  const char* what;
  int (*run)(int argc, char** argv);  // the arguments after the name
};

constexpr Subcommand kSubcommands[] = {
    {"codec", "codec backends, per tier, beside memcpy and the memory limits of the same run", spectrumkv::RunCodecBench},
#if defined(SPECTRUMKV_BENCH_PLAN)
    {"plan", "planning time", spectrumkv::RunPlanBench},
#endif
#if defined(SPECTRUMKV_BENCH_STREAM)
    {"stream", "chunks over loopback beside a plain TCP socket", spectrumkv::RunStreamBench},
#endif
#if defined(SPECTRUMKV_BENCH_E2E)
    {"e2e", "two daemons, other transfer systems, a socket and memcpy move the same pages", spectrumkv::RunE2eBench},
    {"latency", "small transfers, the first layer, idle CPU", spectrumkv::RunLatencyBench},
    {"refine", "a coarse base and then the exact rest, beside RAW alone; what it costs other transfers", spectrumkv::RunRefineBench},
    {"scale", "cost as tokens, layers, heads, blocks, streams and transfers grow; memory; fairness", spectrumkv::RunScaleBench},
#endif
};

int Usage(std::FILE* to) {
  std::fprintf(to, "usage: spectrumkv_bench SUBCOMMAND [options]\n");
  for (const Subcommand& subcommand : kSubcommands) {
    std::fprintf(to, "  %-8s %s\n", subcommand.name, subcommand.what);
  }
  return to == stdout ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return Usage(stderr);
  if (std::strcmp(argv[1], "--help") == 0) return Usage(stdout);
  for (const Subcommand& subcommand : kSubcommands) {
    if (std::strcmp(argv[1], subcommand.name) == 0) return subcommand.run(argc - 2, argv + 2);
  }
  std::fprintf(stderr, "unknown subcommand '%s'\n", argv[1]);
  return Usage(stderr);
}
