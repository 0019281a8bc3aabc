#pragma once

namespace spectrumkv {

// Settings of the process that only speed is about; for main(), before threads start and before gRPC is used.
//
// glibc's malloc must not give megabyte read buffers back to the kernel and fault them in again, which costs a receiver
// up to half its throughput. Nothing is done on other libcs. gRPC's experiments tcp_frame_size_tuning and tcp_rcv_lowat
// are left off, though they save a twentieth of the CPU: with them a peer that sends half a frame and shuts its end is
// not noticed.
void TuneProcess();

}  // namespace spectrumkv
