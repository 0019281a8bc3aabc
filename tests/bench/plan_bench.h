// `spectrumkv_bench plan`: how long planning takes beside moving the bytes it plans.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name; takes no arguments. Prints a table; returns the exit code.
int RunPlanBench(int argc, char** argv);

}  // namespace spectrumkv
