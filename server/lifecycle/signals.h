// SIGTERM and SIGINT as events of the main thread. Construct before any other thread starts: threads inherit the mask.
#pragma once

#include <memory>

namespace spectrumkv {

class StopSignals {
 public:
  // Blocks both signals for this process, and ignores SIGPIPE.
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Waits for a signal (answers its number) or Wake (answers 0).
  int Wait();
  // Thread-safe.
  void Wake();

 private:
  int signals_ = -1;
  int wake_ = -1;
};

}  // namespace spectrumkv
