// Who uses which block of a group: nobody, n sources, or one destination. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace spectrumkv {

// Memory grows with the blocks ever used, in pages of kPageBlocks.
class BlockUse {
 public:
  static constexpr uint64_t kPageBlocks = 1024;

  explicit BlockUse(uint64_t num_blocks) : pages_((num_blocks + kPageBlocks - 1) / kPageBlocks), turns_(pages_.size()) {}

  // REQUIRES of all: block < num_blocks.
  bool IsReserved(uint64_t block) const { return Get(block) == kReserved; }
  bool IsFree(uint64_t block) const { return Get(block) == 0; }
  // REQUIRES: not reserved; undone by Unshare, once each.
  void Share(uint64_t block);
  void Unshare(uint64_t block);
  // REQUIRES: free; undone by Unreserve.
  void Reserve(uint64_t block);
  void Unreserve(uint64_t block);

  // How often the block has been reserved: who had it knows by this whether somebody has had it since.
  uint32_t Turn(uint64_t block) const;

  // Blocks, not uses.
  uint64_t shared() const { return shared_; }
  uint64_t reserved() const { return reserved_; }

 private:
  using Page = std::array<uint32_t, kPageBlocks>;
  static constexpr uint32_t kReserved = UINT32_MAX;
  uint32_t Get(uint64_t block) const;
  uint32_t& At(uint64_t block);

  std::vector<std::unique_ptr<Page>> pages_, turns_;
  uint64_t shared_ = 0, reserved_ = 0;
};

}  // namespace spectrumkv
