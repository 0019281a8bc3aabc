#include "server/pool/block_use.h"

namespace spectrumkv {

uint32_t BlockUse::Get(uint64_t block) const {
  const auto& page = pages_[block / kPageBlocks];
  return page == nullptr ? 0 : (*page)[block % kPageBlocks];
}

uint32_t& BlockUse::At(uint64_t block) {
  auto& page = pages_[block / kPageBlocks];
  if (page == nullptr) page = std::make_unique<Page>();
  return (*page)[block % kPageBlocks];
}

void BlockUse::Share(uint64_t block) {
  if (At(block)++ == 0) ++shared_;
}

void BlockUse::Unshare(uint64_t block) {
  if (--At(block) == 0) --shared_;
}

void BlockUse::Reserve(uint64_t block) {
  At(block) = kReserved;
  ++reserved_;
  auto& turns = turns_[block / kPageBlocks];
  if (turns == nullptr) turns = std::make_unique<Page>();
  ++(*turns)[block % kPageBlocks];
}

uint32_t BlockUse::Turn(uint64_t block) const {
  const auto& turns = turns_[block / kPageBlocks];
  return turns == nullptr ? 0 : (*turns)[block % kPageBlocks];
}

void BlockUse::Unreserve(uint64_t block) {
  At(block) = 0;
  --reserved_;
}

}  // namespace spectrumkv
