#include "kernels/codec/registry.h"

namespace spectrumkv {
bool SelfTest(const Backend&, std::string*) { return true; }
}  // namespace spectrumkv
