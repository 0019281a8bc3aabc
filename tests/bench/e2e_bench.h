// `spectrumkv_bench e2e`: KV moved between two daemon processes over loopback, paged in and paged out, beside memcpy and
// a plain TCP socket of the same run.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name: [--daemon PATH] [--tokens N] [--repeat N] [--json]. Returns the exit code.
int RunE2eBench(int argc, char** argv);

}  // namespace spectrumkv
