#include "server/stream/tune_process.h"

#include <malloc.h>
#include <stdlib.h>

namespace spectrumkv {

void TuneProcess() {
  // NOLINTBEGIN(concurrency-mt-unsafe): main calls it before there are threads
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  mallopt(M_TOP_PAD, 16 << 20);
#endif
  setenv("GRPC_EXPERIMENTS", "tcp_frame_size_tuning,tcp_rcv_lowat", /*replace=*/0);
  // NOLINTEND(concurrency-mt-unsafe)
}

}  // namespace spectrumkv
