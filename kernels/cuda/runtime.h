// The CUDA runtime as the daemon uses it, and no more: devices, memory, streams, events, copies, and the launches of
// codec.h. A seam: CudaRuntime() is the real one; the tests bring one that executes the kernels on the CPU, on streams
// that run late and out of step. Plain C++, so that callers need no CUDA header.
//
// Each call is one call of the CUDA runtime (two where the device has to be chosen first) and tells how it ended as a
// CallStatus; nothing is retried, counted or logged here. Every handle belongs to the device it was made on and is given
// back by its own call, once, by whoever made it. Thread-safe; work on one stream runs in the order of the calls.
//
// What a copy or a kernel touches must stay until its stream has passed it. Host memory of a copy must be pinned: from
// AllocatePinned, or pinned by Pin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/codec.h"

struct CUevent_st;

namespace spectrumkv::gpu {

using Event = CUevent_st*;  // cudaEvent_t

// Values of cudaError_t that somebody tells apart. runtime.cc compares them with the toolkit's.
enum ErrorCode : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInitializationError = 3,
  kInsufficientDriver = 35,
  kDevicesUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kContextUninitialized = 201,
  kMapFailed = 205,
  kNoKernelImage = 209,
  kEccUncorrectable = 214,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kTooManyPeers = 711,
  kHardwareStack = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kLaunchFailure = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemNotReady = 802,
  kDriverMismatch = 803,
  kUnknownError = 999,
  kWithoutCuda = -1,   // ours: the program was built without CUDA
  kDriverTooOld = -2,  // ours: there is a driver, which the runtime says is insufficient
};

// Names and words are static.
struct CallStatus {
  int error = kSuccess;     // cudaError_t
  const char* name = "";    // cudaErrorNoDevice
  const char* words = "";   // no CUDA-capable device is detected
  bool ok() const { return error == kSuccess; }
};

// After one of these nothing works on the device any more, in this process.
bool IsSticky(int error);

struct DeviceProperties {
  char name[256] = "";
  uint8_t uuid[16] = {};
  int compute_major = 0, compute_minor = 0;
  uint64_t total_bytes = 0;
};

// What the context of this process takes of a device's memory: by so much less is free behind its making than before.
struct ContextCost {
  uint64_t bytes = 0;
  bool known = false;  // false: nobody could be asked before there was one (management.h)
};

constexpr size_t kIpcHandleBytes = 64;  // cudaIpcMemHandle_t, cudaIpcEventHandle_t

// A stream and the device it is of.
struct DeviceStream {
  int device = 0;
  Stream stream = nullptr;
};

// Rows of `width_bytes`, so many bytes apart.
struct Pitched {
  uint8_t* data = nullptr;
  size_t pitch_bytes = 0;  // >= width_bytes
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  // 0 devices, and why, where there is no driver, no device or no CUDA in this program.
  virtual CallStatus CountDevices(int* devices) = 0;
  virtual CallStatus Describe(int device, DeviceProperties* properties) = 0;
  // Of the whole device, as its driver counts: what other processes have is not free.
  virtual CallStatus FreeBytes(int device, uint64_t* free_bytes) = 0;
  // Makes the process's context on a device, which every call below would make if there were none, and tells what it
  // took: 0 where there was one. What kernels need beside it, a few MiB, the driver takes when each is first launched.
  virtual CallStatus MakeContext(int device, ContextCost* cost) = 0;

  virtual CallStatus Allocate(int device, uint64_t bytes, void** memory) = 0;
  virtual CallStatus Free(int device, void* memory) = 0;
  // Host memory, pinned for all devices. The one that is named is whose context the call is made in.
  virtual CallStatus AllocatePinned(int device, uint64_t bytes, void** memory) = 0;
  virtual CallStatus FreePinned(int device, void* memory) = 0;
  virtual CallStatus Pin(int device, void* memory, uint64_t bytes) = 0;
  virtual CallStatus Unpin(int device, void* memory) = 0;

  // Memory of another process. `handle` has kIpcHandleBytes, as cudaIpcGetMemHandle gave them; *memory is the beginning
  // of the whole allocation, *bytes its length as the driver knows it.
  virtual CallStatus OpenMemory(int device, const uint8_t* handle, void** memory, uint64_t* bytes) = 0;
  virtual CallStatus CloseMemory(int device, void* memory) = 0;

  virtual CallStatus CreateStream(int device, DeviceStream* stream) = 0;
  // Waits for nothing: what is queued still runs.
  virtual CallStatus DestroyStream(DeviceStream stream) = 0;
  // Blocks, without turning, until everything queued on the stream so far has run.
  virtual CallStatus Synchronize(DeviceStream stream) = 0;

  // An event of another process, as cudaIpcGetEventHandle gave it.
  virtual CallStatus OpenEvent(int device, const uint8_t* handle, Event* event) = 0;
  virtual CallStatus DestroyEvent(int device, Event event) = 0;
  // kNotReady where what the event recorded has not been reached yet. The host waits for nothing.
  virtual CallStatus Query(int device, Event event) = 0;

  // Queued. Either end may be device memory or pinned host memory.
  virtual CallStatus Copy(void* to, const void* from, uint64_t bytes, DeviceStream stream) = 0;
  virtual CallStatus CopyRows(Pitched to, Pitched from, size_t width_bytes, size_t rows, DeviceStream stream) = 0;
  virtual CallStatus Zero(void* memory, uint64_t bytes, DeviceStream stream) = 0;
  virtual CallStatus ZeroRows(Pitched memory, size_t width_bytes, size_t rows, DeviceStream stream) = 0;

  // codec.h.
  virtual LaunchStatus EncodeBatch(const EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                   DeviceStream stream) = 0;
  virtual LaunchStatus DecodeBatch(const DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                   DeviceStream stream) = 0;
  LaunchStatus Encode(const EncodeJob& job, void* workspace, size_t workspace_bytes, DeviceStream stream) {
    return EncodeBatch(&job, 1, workspace, workspace_bytes, stream);
  }
  LaunchStatus Decode(const DecodeJob& job, void* workspace, size_t workspace_bytes, DeviceStream stream) {
    return DecodeBatch(&job, 1, workspace, workspace_bytes, stream);
  }
  virtual LaunchStatus ScanBatch(const ScanJob* jobs, uint32_t count, DeviceStream stream) = 0;
  virtual LaunchStatus SpreadBatch(const SpreadJob* jobs, uint32_t count, DeviceStream stream) = 0;
  virtual LaunchStatus Attend(const AttendJob& job, void* workspace, size_t workspace_bytes, DeviceStream stream) = 0;
  virtual LaunchStatus ZeroTokens(const ZeroJob& job, DeviceStream stream) = 0;
};

// Of this process. Asks the driver when it is first used; a program built without CUDA answers kWithoutCuda.
Runtime* CudaRuntime();

}  // namespace spectrumkv::gpu
