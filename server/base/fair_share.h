// Room that several share: whoever comes later finds some, however much one wants, because nobody may have more than is
// left for others.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace spectrumkv {

// Thread-safe.
template <typename Owner>
class FairShare {
 public:
  // False where there are not `amount` of `limit` left for this owner: of all, or for it to leave as much as it has.
  bool Take(const Owner& owner, size_t amount, size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = of_owner_.find(owner);
    const size_t own = it == of_owner_.end() ? 0 : it->second;
    if (amount > limit || taken_ + own + amount > limit) return false;
    if (amount == 0) return true;
    taken_ += amount;
    of_owner_[owner] = own + amount;
    return true;
  }
  // REQUIRES: it has them.
  void Give(const Owner& owner, size_t amount) {
    if (amount == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    taken_ -= amount;
    const auto it = of_owner_.find(owner);
    if ((it->second -= amount) == 0) of_owner_.erase(it);
  }
  size_t taken() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return taken_;
  }

 private:
  mutable std::mutex mutex_;
  size_t taken_ = 0;
  std::map<Owner, size_t> of_owner_;  // no zeros
};

}  // namespace spectrumkv
