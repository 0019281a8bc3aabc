#include "tests/unit/transfer/simulation/failing_new.h"

#include <new>

namespace {

bool g_refused = false;

}  // namespace

void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  if (g_refused) return nullptr;
  try {
    return ::operator new[](bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

namespace spectrumkv {

void RefuseNothrowNew(bool refused) { g_refused = refused; }

}  // namespace spectrumkv
