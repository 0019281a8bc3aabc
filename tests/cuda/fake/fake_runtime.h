// A gpu::Runtime without a GPU: device memory is host memory that only the fake device may touch (fake_memory.h), the
// kernels run on the shim, and streams run late and out of step: nothing that is queued runs before somebody waits for a
// stream, and then the streams take turns in a seeded order. Whoever reads a result without waiting for it, or frees what
// a queued kernel uses, is found out every time.
//
// Every call can be made to fail with any error, when it is made or, for what is queued, when it runs.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/runtime.h"
#include "tests/cuda/fake/fake_memory.h"

namespace spectrumkv::testing {

struct FakeOptions {
  int devices = 1;
  uint32_t seed = 1;
  uint64_t device_bytes = uint64_t{1} << 30;
  std::optional<uint64_t> context_bytes = uint64_t{300} << 20;  // of each device; none: it cannot be known
};

class FakeRuntime final : public gpu::Runtime {
 public:
  explicit FakeRuntime(FakeOptions options = {});
  // REQUIRES: nothing is queued.
  ~FakeRuntime() override;

  // uuid of a fake device as the daemon writes it.
  static std::string Uuid(int device);

  // The call of this name ("Allocate", "Copy", "Encode", ...) fails with `error` after `good` more that do not; from then
  // on again and again where `always`. For what is queued, `late` lets the call be and fails it when it runs, so that
  // Synchronize tells.
  void Fail(const std::string& call, int error, int good = 0, bool late = false, bool always = false);
  void ForgetFailures();
  // A new context after an error that ended everything, as a new process would have it.
  void Revive();
  // Every call fails with it until then.
  bool failed() const;
  // What is queued never runs.
  void DropQueues();

  // What no device would forgive: "copy from memory that is not pinned", "freed while ..."; and a call that makes a
  // context, whose cost then nobody knows.
  std::vector<std::string> violations() const;
  // Calls so far, by name.
  std::map<std::string, int> calls() const;
  // How often the device turned from one stream to another that was not yet empty.
  uint64_t turns() const;
  // Devices that have a context.
  std::set<int> contexts() const;
  FakeMemory& memory() { return memory_; }

  gpu::CallStatus CountDevices(int* devices) override;
  gpu::CallStatus Describe(int device, gpu::DeviceProperties* properties) override;
  gpu::CallStatus FreeBytes(int device, uint64_t* free_bytes) override;
  gpu::CallStatus MakeContext(int device, gpu::ContextCost* cost) override;
  gpu::CallStatus Allocate(int device, uint64_t bytes, void** memory) override;
  gpu::CallStatus Free(int device, void* memory) override;
  gpu::CallStatus AllocatePinned(int device, uint64_t bytes, void** memory) override;
  gpu::CallStatus FreePinned(int device, void* memory) override;
  gpu::CallStatus Pin(int device, void* memory, uint64_t bytes) override;
  gpu::CallStatus Unpin(int device, void* memory) override;
  gpu::CallStatus OpenMemory(int device, const uint8_t* handle, void** memory, uint64_t* bytes) override;
  gpu::CallStatus CloseMemory(int device, void* memory) override;
  gpu::CallStatus CreateStream(int device, gpu::DeviceStream* stream) override;
  gpu::CallStatus DestroyStream(gpu::DeviceStream stream) override;
  gpu::CallStatus Synchronize(gpu::DeviceStream stream) override;
  gpu::CallStatus OpenEvent(int device, const uint8_t* handle, gpu::Event* event) override;
  gpu::CallStatus DestroyEvent(int device, gpu::Event event) override;
  gpu::CallStatus Query(int device, gpu::Event event) override;
  gpu::CallStatus Copy(void* to, const void* from, uint64_t bytes, gpu::DeviceStream stream) override;
  gpu::CallStatus CopyRows(gpu::Pitched to, gpu::Pitched from, size_t width_bytes, size_t rows,
                           gpu::DeviceStream stream) override;
  gpu::CallStatus Zero(void* memory, uint64_t bytes, gpu::DeviceStream stream) override;
  gpu::CallStatus ZeroRows(gpu::Pitched memory, size_t width_bytes, size_t rows, gpu::DeviceStream stream) override;
  gpu::LaunchStatus EncodeBatch(const gpu::EncodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                gpu::DeviceStream stream) override;
  gpu::LaunchStatus DecodeBatch(const gpu::DecodeJob* jobs, uint32_t count, void* workspace, size_t workspace_bytes,
                                gpu::DeviceStream stream) override;
  gpu::LaunchStatus ScanBatch(const gpu::ScanJob* jobs, uint32_t count, gpu::DeviceStream stream) override;
  gpu::LaunchStatus SpreadBatch(const gpu::SpreadJob* jobs, uint32_t count, gpu::DeviceStream stream) override;
  gpu::LaunchStatus Attend(const gpu::AttendJob& job, void* workspace, size_t workspace_bytes,
                           gpu::DeviceStream stream) override;
  gpu::LaunchStatus ZeroTokens(const gpu::ZeroJob& job, gpu::DeviceStream stream) override;

 private:
  struct Op {
    std::string name;
    std::function<void()> run;
    std::vector<uintptr_t> uses;     // allocations, by their beginning
    int error = 0;                    // what running it comes to
  };
  struct FakeStream {
    int device = 0;
    std::deque<Op> queue;
    bool running = false;
    int error = 0;  // told by the next Synchronize
  };
  struct Failure {
    int error, good;
    bool late, always;
  };

  // Counts the call; the error it must end with. `late`: what it must come to when it runs.
  int Called(const std::string& call, int* late = nullptr);
  // The same of a call that works on a device, which makes a context there.
  int CalledOn(int device, const std::string& call, int* late = nullptr);
  gpu::CallStatus Told(int error) const;
  gpu::CallStatus Queue(const std::string& call, gpu::DeviceStream stream, std::vector<std::pair<const void*, uint64_t>> uses,
                        std::function<void()> run);
  gpu::LaunchStatus Launch(const std::string& call, gpu::DeviceStream stream, const char* wrong,
                           std::vector<const void*> uses, std::function<void()> run);
  gpu::CallStatus FreeUnused(int device, const std::string& call, FakeMemory::Kind kind, void* memory);
  void Violate(const std::string& what);
  void Run();
  FakeStream* Pick();
  FakeStream* StreamOf(gpu::DeviceStream stream) { return reinterpret_cast<FakeStream*>(stream.stream); }

  const FakeOptions options_;
  FakeMemory memory_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<FakeStream>> streams_;
  std::map<std::string, std::deque<Failure>> failures_;
  std::map<std::string, int> calls_;
  std::vector<std::string> violations_;
  std::set<int> contexts_;
  std::mt19937 rng_;
  FakeStream* last_ = nullptr;
  uint64_t turns_ = 0;
  int waiting_ = 0;  // in Synchronize
  int sticky_ = 0;
  bool stopping_ = false;
  std::thread device_;
};

}  // namespace spectrumkv::testing
