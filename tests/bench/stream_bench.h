// `spectrumkv_bench stream`: chunks per second over loopback beside a plain TCP socket of the same run.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name; [--seconds S] per cell, default 1. Prints a table; returns the exit code.
int RunStreamBench(int argc, char** argv);

}  // namespace spectrumkv
