// Keeps the daemon alive when the owner of a shared segment truncates it: a read behind the new end raises SIGBUS.
//
// The process-wide handler looks the address up in a table of guarded mappings. Inside one, everything from the
// faulting page to the end of the mapping becomes private zero pages (a truncation took all of that), the mapping is
// marked failed, and the access goes on. Any other SIGBUS gets the default action: the process ends.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spectrumkv {

// Guards [data, data + size) until destroyed. Thread-safe. The handler is installed by the first one.
class SigbusGuard {
 public:
  // Most ranges guarded at one time in the process. One user's share of them is bounded by quota.segments_per_user.
  static constexpr size_t kMaxRanges = 16384;

  // REQUIRES: data is page aligned.
  SigbusGuard(void* data, size_t size);
  // REQUIRES: nobody touches the range any more.
  ~SigbusGuard();
  SigbusGuard(const SigbusGuard&) = delete;
  SigbusGuard& operator=(const SigbusGuard&) = delete;

  // False: the table was full and nothing is guarded.
  bool armed() const { return entry_ >= 0; }
  // True for ever once an access found nothing behind its page, or Fail was called.
  bool failed() const;
  void Fail();

 private:
  int entry_ = -1;
};

}  // namespace spectrumkv
