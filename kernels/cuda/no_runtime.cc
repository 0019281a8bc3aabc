// The runtime of a build without CUDA: no devices, and why.
#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {
namespace {

constexpr CallStatus kNone{kWithoutCuda, "without CUDA", "this program was built without CUDA"};
constexpr LaunchStatus kNotLaunched{"without CUDA", kWithoutCuda};

class NoRuntime final : public Runtime {
 public:
  CallStatus CountDevices(int* devices) override {
    *devices = 0;
    return kNone;
  }
  CallStatus Describe(int, DeviceProperties*) override { return kNone; }
  CallStatus FreeBytes(int, uint64_t*) override { return kNone; }
  CallStatus MakeContext(int, ContextCost*) override { return kNone; }
  CallStatus Allocate(int, uint64_t, void**) override { return kNone; }
  CallStatus Free(int, void*) override { return kNone; }
  CallStatus AllocatePinned(int, uint64_t, void**) override { return kNone; }
  CallStatus FreePinned(int, void*) override { return kNone; }
  CallStatus Pin(int, void*, uint64_t) override { return kNone; }
  CallStatus Unpin(int, void*) override { return kNone; }
  CallStatus OpenMemory(int, const uint8_t*, void**, uint64_t*) override { return kNone; }
  CallStatus CloseMemory(int, void*) override { return kNone; }
  CallStatus CreateStream(int, DeviceStream*) override { return kNone; }
  CallStatus DestroyStream(DeviceStream) override { return kNone; }
  CallStatus Synchronize(DeviceStream) override { return kNone; }
  CallStatus OpenEvent(int, const uint8_t*, Event*) override { return kNone; }
  CallStatus DestroyEvent(int, Event) override { return kNone; }
  CallStatus Query(int, Event) override { return kNone; }
  CallStatus Copy(void*, const void*, uint64_t, DeviceStream) override { return kNone; }
  CallStatus CopyRows(Pitched, Pitched, size_t, size_t, DeviceStream) override { return kNone; }
  CallStatus Zero(void*, uint64_t, DeviceStream) override { return kNone; }
  CallStatus ZeroRows(Pitched, size_t, size_t, DeviceStream) override { return kNone; }
  LaunchStatus EncodeBatch(const EncodeJob*, uint32_t, void*, size_t, DeviceStream) override { return kNotLaunched; }
  LaunchStatus DecodeBatch(const DecodeJob*, uint32_t, void*, size_t, DeviceStream) override { return kNotLaunched; }
  LaunchStatus ScanBatch(const ScanJob*, uint32_t, DeviceStream) override { return kNotLaunched; }
  LaunchStatus SpreadBatch(const SpreadJob*, uint32_t, DeviceStream) override { return kNotLaunched; }
  LaunchStatus Attend(const AttendJob&, void*, size_t, DeviceStream) override { return kNotLaunched; }
  LaunchStatus ZeroTokens(const ZeroJob&, DeviceStream) override { return kNotLaunched; }
};

}  // namespace

Runtime* CudaRuntime() {
  static NoRuntime* const runtime = new NoRuntime;
  return runtime;
}

}  // namespace spectrumkv::gpu
