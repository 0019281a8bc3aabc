#include "server/stream/tune_process.h"

#include <malloc.h>

namespace spectrumkv {

void TuneProcess() {
#ifdef __GLIBC__
  // NOLINTBEGIN(concurrency-mt-unsafe): main calls it before there are threads
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  mallopt(M_TOP_PAD, 16 << 20);
  // NOLINTEND(concurrency-mt-unsafe)
#endif
}

}  // namespace spectrumkv
