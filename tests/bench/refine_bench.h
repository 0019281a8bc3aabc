// `spectrumkv_bench refine`: a coarse base, then the exact rest, beside RAW alone.
#pragma once

namespace spectrumkv {

// Arguments after "refine"; the exit status. Needs spectrumkvd.
int RunRefineBench(int argc, char** argv);

}  // namespace spectrumkv
