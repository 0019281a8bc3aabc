#include "server/memory/sigbus_guard.h"

#include <csignal>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <mutex>

namespace spectrumkv {
namespace {

// Written under the mutex below, read by the handler without a lock: `version` is odd while an entry changes. The entry
// of a range that somebody is touching does not change, so the handler may skip one that does.
struct Entry {
  std::atomic<uint32_t> version{0};
  std::atomic<bool> failed{false};
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
};
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

std::array<Entry, SigbusGuard::kMaxRanges> g_entries;
std::atomic<size_t> g_entries_ever_used{0};
uintptr_t g_page_bytes = 4096;
std::mutex g_mutex;

void WriteEntry(Entry* entry, uintptr_t begin, uintptr_t end) {
  entry->version.fetch_add(1);
  entry->begin.store(begin);
  entry->end.store(end);
  entry->failed.store(false);
  entry->version.fetch_add(1);
}

// Async-signal-safe, as all that the handler calls.
Entry* FindEntry(uintptr_t address, uintptr_t* end) {
  const size_t used = g_entries_ever_used.load();
  for (size_t i = 0; i < used; ++i) {
    Entry& entry = g_entries[i];
    const uint32_t version = entry.version.load();
    const uintptr_t entry_begin = entry.begin.load(), entry_end = entry.end.load();
    if (version % 2 != 0 || entry.version.load() != version) continue;
    if (address < entry_begin || address >= entry_end) continue;
    *end = entry_end;
    return &entry;
  }
  return nullptr;
}

void DefaultAction(int signal, const siginfo_t* info) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  // A fault happens again when the handler returns; a signal that somebody sent must be sent again.
  if (info->si_code <= 0) raise(signal);
}

void OnSigbus(int signal, siginfo_t* info, void*) {
  const int saved_errno = errno;
  const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  uintptr_t end = 0;
  Entry* entry = info->si_code > 0 ? FindEntry(address, &end) : nullptr;
  bool repaired = false;
  if (entry != nullptr) {
    entry->failed.store(true);
    const uintptr_t page = address / g_page_bytes * g_page_bytes;
    // The system call itself: the library's mmap is not promised to be async-signal-safe.
    repaired = syscall(SYS_mmap, page, end - page, PROT_READ | PROT_WRITE,
                       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L) != -1;
  }
  if (!repaired) DefaultAction(signal, info);
  errno = saved_errno;
}

void InstallHandler() {
  g_page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = &OnSigbus;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

SigbusGuard::SigbusGuard(void* data, size_t size) {
  static std::once_flag installed;
  std::call_once(installed, InstallHandler);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  // Rounded up to the page: a fault in the last page reports an address anywhere in it.
  const uintptr_t end = (begin + size + g_page_bytes - 1) / g_page_bytes * g_page_bytes;
  std::lock_guard<std::mutex> lock(g_mutex);
  for (size_t i = 0; i < g_entries.size(); ++i) {
    if (g_entries[i].end.load() != 0) continue;
    WriteEntry(&g_entries[i], begin, end);
    if (i >= g_entries_ever_used.load()) g_entries_ever_used.store(i + 1);
    entry_ = static_cast<int>(i);
    return;
  }
}

SigbusGuard::~SigbusGuard() {
  if (entry_ < 0) return;
  std::lock_guard<std::mutex> lock(g_mutex);
  WriteEntry(&g_entries[static_cast<size_t>(entry_)], 0, 0);
}

void SigbusGuard::Fail() {
  if (entry_ >= 0) g_entries[static_cast<size_t>(entry_)].failed.store(true);
}

bool SigbusGuard::failed() const { return entry_ >= 0 && g_entries[static_cast<size_t>(entry_)].failed.load(); }

}  // namespace spectrumkv
