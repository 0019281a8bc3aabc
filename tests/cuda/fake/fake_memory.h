// Memory of a device that is not there: host memory that nobody may touch but the fake device while it works. A read or
// write of it by other code ends the process with SIGSEGV, as on a machine with a GPU.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/cuda/shim/block.h"

namespace spectrumkv::testing {

// What a handle of another process's memory or event holds in its 64 bytes.
struct FakeHandle {
  char magic[8];  // "fakemem" or "fakeevt"
  int32_t device;
  uint32_t reserved;
  uint64_t bytes;
  char name[40];  // of the POSIX shared memory behind it
};
static_assert(sizeof(FakeHandle) == 64);

// A worker's GPU memory, or an event, as the fake devices of other processes open it. May be made in any process, also
// in that of the fake device. REQUIRES: this machine has POSIX shared memory.
class FakeExport {
 public:
  static FakeExport Memory(int device, uint64_t bytes);
  static FakeExport Event(int device);
  FakeExport(FakeExport&& other) noexcept;
  FakeExport& operator=(FakeExport&&) = delete;
  ~FakeExport();

  // The 64 bytes, as cudaIpcGetMemHandle gives them.
  std::string handle() const;
  // The worker's view of its memory.
  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return handle_.bytes; }
  // Of an event: what was recorded has been reached.
  void Reach();
  // The worker is dead: its handle opens nothing any more. What is open stays.
  void Die();

 private:
  FakeExport(const char* magic, int device, uint64_t bytes);
  FakeHandle handle_;
  uint8_t* data_ = nullptr;
};

// Thread-safe.
class FakeMemory {
 public:
  enum class Kind { kDevice, kPinned };
  ~FakeMemory();

  // Null where there is none.
  uint8_t* Allocate(Kind kind, uint64_t bytes);
  // Null where the handle is not of this kind, its owner is gone or the device is another.
  uint8_t* Open(const uint8_t* handle, const char* magic, int device, uint64_t* bytes);
  // Host memory that belongs to somebody else.
  void Adopt(void* memory, uint64_t bytes);
  // False where nothing of this kind begins there.
  bool Release(Kind kind, void* memory);

  // Where the allocation that holds all of [address, address + bytes) begins.
  std::optional<uintptr_t> Find(const void* address, uint64_t bytes, std::optional<Kind> kind = std::nullopt) const;
  std::vector<shim::Range> Ranges() const;
  size_t live(Kind kind) const;

  // While it lives, the fake device may touch its memory.
  class Unlocked {
   public:
    explicit Unlocked(FakeMemory* memory);
    ~Unlocked();

   private:
    FakeMemory* const memory_;
  };

 private:
  struct Piece {
    Kind kind;
    uint64_t bytes, mapped_bytes;
    bool adopted;
  };
  void Protect(int protection) const;
  mutable std::mutex mutex_;
  std::map<uintptr_t, Piece> pieces_;
  bool unlocked_ = false;
};

}  // namespace spectrumkv::testing
