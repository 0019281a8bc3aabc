#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {

bool IsSticky(int error) {
  switch (error) {
    case kEccUncorrectable:
    case 220:  // cudaErrorNvlinkUncorrectable
    case 226:  // cudaErrorContained
    case kIllegalAddress:
    case kLaunchTimeout:
    case kHardwareStack:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case 710:  // cudaErrorAssert
    case 717:  // cudaErrorInvalidAddressSpace
    case 718:  // cudaErrorInvalidPc
    case kLaunchFailure:
    case 721:  // cudaErrorTensorMemoryLeak
    case 810:  // cudaErrorMpsClientTerminated
    case 911:  // cudaErrorExternalDevice
      return true;
    default: return false;
  }
}

}  // namespace spectrumkv::gpu
