// `spectrumkv_bench scale`: what a transfer costs as tokens, layers, heads, block size, streams and the number of
// transfers at a time grow; what memory the daemons take; what 100,000 blocks in one request cost.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name; --help lists the options. Returns the exit code.
int RunScaleBench(int argc, char** argv);

}  // namespace spectrumkv
