// Runtime over cudart. The device is chosen for the calling thread at each call that needs one.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/management.h"
#include "kernels/cuda/runtime.h"

namespace spectrumkv::gpu {
namespace {

constexpr bool Same(ErrorCode ours, cudaError_t theirs) { return static_cast<int>(ours) == static_cast<int>(theirs); }
static_assert(Same(kSuccess, cudaSuccess));
static_assert(Same(kInvalidValue, cudaErrorInvalidValue));
static_assert(Same(kOutOfMemory, cudaErrorMemoryAllocation));
static_assert(Same(kInitializationError, cudaErrorInitializationError));
static_assert(Same(kInsufficientDriver, cudaErrorInsufficientDriver));
static_assert(Same(kDevicesUnavailable, cudaErrorDevicesUnavailable));
static_assert(Same(kNoDevice, cudaErrorNoDevice));
static_assert(Same(kInvalidDevice, cudaErrorInvalidDevice));
static_assert(Same(kContextUninitialized, cudaErrorDeviceUninitialized));
static_assert(Same(kMapFailed, cudaErrorMapBufferObjectFailed));
static_assert(Same(kNoKernelImage, cudaErrorNoKernelImageForDevice));
static_assert(Same(kEccUncorrectable, cudaErrorECCUncorrectable));
static_assert(Same(kInvalidHandle, cudaErrorInvalidResourceHandle));
static_assert(Same(kNotReady, cudaErrorNotReady));
static_assert(Same(kIllegalAddress, cudaErrorIllegalAddress));
static_assert(Same(kLaunchTimeout, cudaErrorLaunchTimeout));
static_assert(Same(kTooManyPeers, cudaErrorTooManyPeers));
static_assert(Same(kHardwareStack, cudaErrorHardwareStackError));
static_assert(Same(kIllegalInstruction, cudaErrorIllegalInstruction));
static_assert(Same(kMisalignedAddress, cudaErrorMisalignedAddress));
static_assert(Same(kLaunchFailure, cudaErrorLaunchFailure));
static_assert(Same(kNotPermitted, cudaErrorNotPermitted));
static_assert(Same(kNotSupported, cudaErrorNotSupported));
static_assert(Same(kSystemNotReady, cudaErrorSystemNotReady));
static_assert(Same(kDriverMismatch, cudaErrorSystemDriverMismatch));
static_assert(Same(kUnknownError, cudaErrorUnknown));
static_assert(kIpcHandleBytes == sizeof(cudaIpcMemHandle_t) && kIpcHandleBytes == sizeof(cudaIpcEventHandle_t));

CallStatus Told(cudaError_t error) {
  if (error == cudaSuccess) return CallStatus{};
  cudaGetLastError();  // else a later launch would be told of it
  return CallStatus{static_cast<int>(error), cudaGetErrorName(error), cudaGetErrorString(error)};
}

// cuMemGetAddressRange, which the runtime has no call for. 0 for CUDA_SUCCESS.
using RangeOfMemory = int (*)(unsigned long long* base, size_t* bytes, unsigned long long address);

RangeOfMemory FindRangeOfMemory() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 3020;  // cuMemGetAddressRange_v2
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<RangeOfMemory>(function);
}

class Cuda final : public Runtime {
 public:
  CallStatus CountDevices(int* devices) override {
    *devices = 0;
    const CallStatus told = Told(cudaGetDeviceCount(devices));
    int driver = 0;  // stays where there is none
    if (told.error != kInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return told;
    return CallStatus{kDriverTooOld, told.name, told.words};
  }

  CallStatus Describe(int device, DeviceProperties* properties) override {
    cudaDeviceProp found;
    if (const cudaError_t error = cudaGetDeviceProperties(&found, device); error != cudaSuccess) return Told(error);
    std::memcpy(properties->name, found.name, std::min(sizeof(properties->name), sizeof(found.name)));
    static_assert(sizeof(properties->uuid) == sizeof(found.uuid.bytes));
    std::memcpy(properties->uuid, found.uuid.bytes, sizeof(properties->uuid));
    properties->compute_major = found.major;
    properties->compute_minor = found.minor;
    properties->total_bytes = found.totalGlobalMem;
    return CallStatus{};
  }

  CallStatus FreeBytes(int device, uint64_t* free_bytes) override {
    size_t left = 0, total = 0;
    const CallStatus status = On(device, [&] { return cudaMemGetInfo(&left, &total); });
    *free_bytes = left;
    return status;
  }

  CallStatus MakeContext(int device, ContextCost* cost) override {
    DeviceProperties properties;
    if (const CallStatus told = Describe(device, &properties); !told.ok()) return told;
    static const Management management("libnvidia-ml.so.1");
    uint64_t before = 0, after = 0;
    const bool asked = management.FreeBytes(properties.uuid, &before);
    if (const cudaError_t error = Choose(device); error != cudaSuccess) return Told(error);
    cost->known = asked && management.FreeBytes(properties.uuid, &after);
    cost->bytes = cost->known && after < before ? before - after : 0;
    return CallStatus{};
  }

  CallStatus Allocate(int device, uint64_t bytes, void** memory) override {
    return On(device, [&] { return cudaMalloc(memory, bytes); });
  }
  CallStatus Free(int device, void* memory) override {
    return On(device, [&] { return cudaFree(memory); });
  }
  CallStatus AllocatePinned(int device, uint64_t bytes, void** memory) override {
    return On(device, [&] { return cudaHostAlloc(memory, bytes, cudaHostAllocPortable); });
  }
  CallStatus FreePinned(int device, void* memory) override {
    return On(device, [&] { return cudaFreeHost(memory); });
  }
  CallStatus Pin(int device, void* memory, uint64_t bytes) override {
    return On(device, [&] { return cudaHostRegister(memory, bytes, cudaHostRegisterPortable); });
  }
  CallStatus Unpin(int device, void* memory) override {
    return On(device, [&] { return cudaHostUnregister(memory); });
  }

  CallStatus OpenMemory(int device, const uint8_t* handle, void** memory, uint64_t* bytes) override {
    cudaIpcMemHandle_t copy;
    std::memcpy(&copy, handle, sizeof(copy));
    CallStatus status =
        On(device, [&] { return cudaIpcOpenMemHandle(memory, copy, cudaIpcMemLazyEnablePeerAccess); });
    if (!status.ok()) return status;
    static const RangeOfMemory range_of = FindRangeOfMemory();
    unsigned long long base = 0;
    size_t length = 0;
    if (range_of == nullptr || range_of(&base, &length, reinterpret_cast<unsigned long long>(*memory)) != 0) {
      CloseMemory(device, *memory);
      return CallStatus{kNotSupported, "cuMemGetAddressRange", "the driver does not tell how long an allocation is"};
    }
    *bytes = base + length - reinterpret_cast<unsigned long long>(*memory);
    return status;
  }
  CallStatus CloseMemory(int device, void* memory) override {
    return On(device, [&] { return cudaIpcCloseMemHandle(memory); });
  }

  CallStatus CreateStream(int device, DeviceStream* stream) override {
    stream->device = device;
    return On(device, [&] { return cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking); });
  }
  CallStatus DestroyStream(DeviceStream stream) override {
    return On(stream.device, [&] { return cudaStreamDestroy(stream.stream); });
  }
  CallStatus Synchronize(DeviceStream stream) override {
    return On(stream.device, [&] { return cudaStreamSynchronize(stream.stream); });
  }

  CallStatus OpenEvent(int device, const uint8_t* handle, Event* event) override {
    cudaIpcEventHandle_t copy;
    std::memcpy(&copy, handle, sizeof(copy));
    return On(device, [&] { return cudaIpcOpenEventHandle(event, copy); });
  }
  CallStatus DestroyEvent(int device, Event event) override {
    return On(device, [&] { return cudaEventDestroy(event); });
  }
  CallStatus Query(int device, Event event) override {
    return On(device, [&] { return cudaEventQuery(event); });
  }

  CallStatus Copy(void* to, const void* from, uint64_t bytes, DeviceStream stream) override {
    return On(stream.device, [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream.stream); });
  }
  CallStatus CopyRows(Pitched to, Pitched from, size_t width_bytes, size_t rows, DeviceStream stream) override {
    return On(stream.device, [&] {
      return cudaMemcpy2DAsync(to.data, to.pitch_bytes, from.data, from.pitch_bytes, width_bytes, rows,
                               cudaMemcpyDefault, stream.stream);
    });
  }
  CallStatus Zero(void* memory, uint64_t bytes, DeviceStream stream) override {
    return On(stream.device, [&] { return cudaMemsetAsync(memory, 0, bytes, stream.stream); });
  }
  CallStatus ZeroRows(Pitched memory, size_t width_bytes, size_t rows, DeviceStream stream) override {
    return On(stream.device, [&] {
      return cudaMemset2DAsync(memory.data, memory.pitch_bytes, 0, width_bytes, rows, stream.stream);
    });
  }

  LaunchStatus EncodeBatch(const EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                           DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchEncode(jobs, count, workspace, workspace_bytes, stream.stream); });
  }
  LaunchStatus DecodeBatch(const DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                           DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchDecode(jobs, count, workspace, workspace_bytes, stream.stream); });
  }
  LaunchStatus ScanBatch(const ScanJob* jobs, uint32_t count, DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchScan(jobs, count, stream.stream); });
  }
  LaunchStatus SpreadBatch(const SpreadJob* jobs, uint32_t count, DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchSpread(jobs, count, stream.stream); });
  }
  LaunchStatus Attend(const AttendJob& job, void* workspace, size_t workspace_bytes, DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchAttend(job, workspace, workspace_bytes, stream.stream); });
  }
  LaunchStatus ZeroTokens(const ZeroJob& job, DeviceStream stream) override {
    return Launch(stream, [&] { return LaunchZero(job, stream.stream); });
  }

 private:
  template <typename Call>
  CallStatus On(int device, const Call& call) {
    if (const cudaError_t error = Choose(device); error != cudaSuccess) return Told(error);
    return Told(call());
  }
  template <typename Call>
  LaunchStatus Launch(DeviceStream stream, const Call& call) {
    if (const cudaError_t error = Choose(stream.device); error != cudaSuccess) {
      const CallStatus told = Told(error);
      return LaunchStatus{told.name, told.error};
    }
    return call();
  }

  // Whoever waits for this device sleeps: a thread that turns would take a core from the codec. Choosing a device makes its
  // context, so the flags come before.
  cudaError_t Choose(int device) {
    static thread_local int chosen = -1;
    if (device == chosen) return cudaSuccess;
    const cudaError_t made = cudaInitDevice(device, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid);
    if (made != cudaSuccess) return made;
    const cudaError_t set = cudaSetDevice(device);
    if (set == cudaSuccess) chosen = device;
    return set;
  }
};

}  // namespace

Runtime* CudaRuntime() {
  static Cuda* const runtime = new Cuda;  // never destroyed: threads may use it until the process ends
  return runtime;
}

}  // namespace spectrumkv::gpu
