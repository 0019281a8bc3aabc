#include "tests/cuda/fake/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

namespace spectrumkv::testing {
namespace {

constexpr uint64_t kPage = 4096;
uint64_t Pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

uint8_t* MapShared(const char* name, uint64_t bytes, int flags) {
  const int fd = shm_open(name, flags, 0600);
  if (fd < 0) return nullptr;
  const bool sized = (flags & O_CREAT) == 0 || ftruncate(fd, static_cast<off_t>(Pages(bytes))) == 0;
  void* memory = sized ? mmap(nullptr, Pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
}

}  // namespace

FakeExport::FakeExport(const char* magic, int device, uint64_t bytes) : handle_{} {
  static std::atomic<int> counter{0};
  std::memcpy(handle_.magic, magic, 8);
  handle_.device = device;
  handle_.bytes = bytes;
  std::snprintf(handle_.name, sizeof(handle_.name), "/skv-fake-%d-%d", static_cast<int>(getpid()), counter.fetch_add(1));
  data_ = MapShared(handle_.name, bytes, O_CREAT | O_EXCL | O_RDWR);
}

FakeExport FakeExport::Memory(int device, uint64_t bytes) { return FakeExport("fakemem", device, bytes); }
FakeExport FakeExport::Event(int device) { return FakeExport("fakeevt", device, sizeof(uint32_t)); }

FakeExport::FakeExport(FakeExport&& other) noexcept
    : handle_(other.handle_), data_(std::exchange(other.data_, nullptr)) {
  other.handle_.name[0] = 0;
}

FakeExport::~FakeExport() {
  Die();
  if (data_ != nullptr) munmap(data_, Pages(handle_.bytes));
}

std::string FakeExport::handle() const { return std::string(reinterpret_cast<const char*>(&handle_), sizeof(handle_)); }

void FakeExport::Reach() { __atomic_store_n(reinterpret_cast<uint32_t*>(data_), 1, __ATOMIC_RELEASE); }

void FakeExport::Die() {
  if (handle_.name[0] != 0) shm_unlink(handle_.name);
}

FakeMemory::~FakeMemory() {
  for (const auto& [begin, piece] : pieces_) {
    if (!piece.adopted) munmap(reinterpret_cast<void*>(begin), piece.mapped_bytes);
  }
}

uint8_t* FakeMemory::Allocate(Kind kind, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool hidden = kind == Kind::kDevice && !unlocked_;
  // A page behind it that is nobody's: overruns of the last page end in it.
  void* memory = mmap(nullptr, Pages(bytes) + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  mprotect(memory, Pages(bytes), PROT_READ | PROT_WRITE);
  std::memset(memory, 0xA5, Pages(bytes));  // what is not written shows
  if (hidden) mprotect(memory, Pages(bytes), PROT_NONE);
  pieces_[reinterpret_cast<uintptr_t>(memory)] = {kind, bytes, Pages(bytes) + kPage, false};
  return static_cast<uint8_t*>(memory);
}

uint8_t* FakeMemory::Open(const uint8_t* handle, const char* magic, int device, uint64_t* bytes) {
  FakeHandle fake;
  std::memcpy(&fake, handle, sizeof(fake));
  if (std::memcmp(fake.magic, magic, 8) != 0 || fake.device != device || fake.bytes == 0) return nullptr;
  fake.name[sizeof(fake.name) - 1] = 0;
  uint8_t* memory = MapShared(fake.name, fake.bytes, O_RDWR);
  if (memory == nullptr) return nullptr;
  *bytes = fake.bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_event = std::strcmp(magic, "fakeevt") == 0;
  if (!unlocked_ && !is_event) mprotect(memory, Pages(fake.bytes), PROT_NONE);
  pieces_[reinterpret_cast<uintptr_t>(memory)] = {is_event ? Kind::kPinned : Kind::kDevice, fake.bytes,
                                                  Pages(fake.bytes), false};
  return memory;
}

void FakeMemory::Adopt(void* memory, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  pieces_[reinterpret_cast<uintptr_t>(memory)] = {Kind::kPinned, bytes, bytes, true};
}

bool FakeMemory::Release(Kind kind, void* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pieces_.find(reinterpret_cast<uintptr_t>(memory));
  if (found == pieces_.end() || found->second.kind != kind) return false;
  if (!found->second.adopted) munmap(memory, found->second.mapped_bytes);
  pieces_.erase(found);
  return true;
}

std::optional<uintptr_t> FakeMemory::Find(const void* address, uint64_t bytes, std::optional<Kind> kind) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = pieces_.upper_bound(at);
  if (found == pieces_.begin()) return std::nullopt;
  --found;
  const uint64_t offset = at - found->first;
  if (offset > found->second.bytes || bytes > found->second.bytes - offset) return std::nullopt;
  if (kind.has_value() && found->second.kind != *kind) return std::nullopt;
  return found->first;
}

std::vector<shim::Range> FakeMemory::Ranges() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<shim::Range> ranges;
  for (const auto& [begin, piece] : pieces_) ranges.push_back({reinterpret_cast<const void*>(begin), piece.bytes});
  return ranges;
}

size_t FakeMemory::live(Kind kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t count = 0;
  for (const auto& [begin, piece] : pieces_) count += piece.kind == kind ? 1 : 0;
  return count;
}

void FakeMemory::Protect(int protection) const {
  for (const auto& [begin, piece] : pieces_) {
    if (piece.kind == Kind::kDevice) mprotect(reinterpret_cast<void*>(begin), Pages(piece.bytes), protection);
  }
}

FakeMemory::Unlocked::Unlocked(FakeMemory* memory) : memory_(memory) {
  std::lock_guard<std::mutex> lock(memory_->mutex_);
  memory_->unlocked_ = true;
  memory_->Protect(PROT_READ | PROT_WRITE);
}

FakeMemory::Unlocked::~Unlocked() {
  std::lock_guard<std::mutex> lock(memory_->mutex_);
  memory_->unlocked_ = false;
  memory_->Protect(PROT_NONE);
}

}  // namespace spectrumkv::testing
