// Time as a seam: monotonic now, and timers. Tests use FakeClock (tests/unit/base/fake_clock.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace spectrumkv {

using TimerId = uint64_t;  // 0 is no timer

// Thread-safe. Callbacks run on the clock's own thread and must return quickly: post to an Executor. A callback may
// call CallAt and Cancel; it must not destroy the clock.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic nanoseconds; the origin means nothing.
  virtual int64_t NowNs() = 0;
  // Runs `callback` once, at or soon after `deadline_ns`. Equal deadlines run in the order of the calls.
  virtual TimerId CallAt(int64_t deadline_ns, std::function<void()> callback) = 0;
  // True if the callback will not run any more; false if it has run, or is running now.
  virtual bool Cancel(TimerId timer) = 0;
  // Waits for a callback that is running; none runs after it, timers that are left and new ones never do. Before what
  // callbacks use is destroyed.
  virtual void Stop() = 0;
};

// The destructor stops it and drops the timers that are left.
std::unique_ptr<Clock> NewSystemClock();

}  // namespace spectrumkv
