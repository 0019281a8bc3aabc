#include "kernels/codec/backend.h"

namespace spectrumkv {

uint8_t* Workspace::Reserve(size_t bytes) {
  constexpr size_t kAlign = 64;
  if (memory_.size() < bytes + kAlign) {
    memory_.clear();  // the contents are not kept, so nothing needs to be copied
    memory_.resize(bytes + kAlign);
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
  return memory_.data() + (kAlign - start % kAlign) % kAlign;
}

}  // namespace spectrumkv
