#pragma once

namespace spectrumkv {

// Settings of the process that only speed is about; for main(), before threads start and before gRPC is used.
//
// glibc's malloc must not give megabyte read buffers back to the kernel and fault them in again, which costs a receiver
// up to half its throughput (nothing is done on other libcs). gRPC shall read a frame in few large pieces and be woken
// when they are there (its experiments tcp_frame_size_tuning and tcp_rcv_lowat), which saves a twentieth of the CPU;
// GRPC_EXPERIMENTS in the environment takes precedence.
void TuneProcess();

}  // namespace spectrumkv
