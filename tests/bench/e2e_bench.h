// `spectrumkv_bench e2e`: the same KV, paged in and paged out, moved by two daemon processes at several precisions, by
// other transfer systems, by a plain socket and by memcpy, in turns within one run.
#pragma once

namespace spectrumkv {

// argv: after the subcommand's name; --help lists the options. Returns the exit code.
int RunE2eBench(int argc, char** argv);

}  // namespace spectrumkv
