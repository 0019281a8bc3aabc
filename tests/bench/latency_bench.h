// `spectrumkv_bench latency`: what a small transfer takes over warm connections, how early the first layer of a large one
// is ready, and what two idle daemons cost.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name; --help lists the options. Returns the exit code.
int RunLatencyBench(int argc, char** argv);

}  // namespace spectrumkv
