#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {

bool IsSticky(int error) {
  switch (error) {
    case kEccUncorrectable:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kHardwareStack:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case 710:  // cudaErrorAssert
    case 717:  // cudaErrorInvalidAddressSpace
    case 718:  // cudaErrorInvalidPc
    case kLaunchFailure: return true;
    default: return false;
  }
}

}  // namespace spectrumkv::gpu
