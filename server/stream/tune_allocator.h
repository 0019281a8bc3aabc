#pragma once

namespace spectrumkv {

// Keeps glibc's malloc from giving megabyte read buffers back to the kernel and faulting them in again, which costs a
// receiver up to half its throughput. Process-wide: for main(), before threads start. Does nothing on other libcs.
void TuneAllocator();

}  // namespace spectrumkv
