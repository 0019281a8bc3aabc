#include "kernels/format/types.h"

namespace spectrumkv {

const char* TierName(Tier tier) {
  switch (tier) {
    case Tier::kRaw: return "RAW";
    case Tier::kP8: return "P8";
    case Tier::kQ4: return "Q4";
    case Tier::kQ3: return "Q3";
    case Tier::kQ2: return "Q2";
    case Tier::kP4: return "P4";
    case Tier::kQ8: return "Q8";
  }
  return "?";
}

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
  }
  return "?";
}

}  // namespace spectrumkv
