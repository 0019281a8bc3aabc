#include "server/lifecycle/readiness.h"

#include <utility>

namespace spectrumkv {

Readiness::Readiness(std::function<void(bool)> tell) : tell_(std::move(tell)) {}

void Readiness::Announce() {
  std::lock_guard<std::mutex> lock(mutex_);
  tell_(ready_.load());
}

void Readiness::Begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (over_) return;
  ready_ = true;
  tell_(true);
}

void Readiness::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  over_ = true;
  ready_ = false;
  tell_(false);
}

}  // namespace spectrumkv
