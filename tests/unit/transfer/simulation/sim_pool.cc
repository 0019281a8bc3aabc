#include "tests/unit/transfer/simulation/sim_pool.h"

#include <algorithm>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr PlaneId kPlanes[] = {PlaneId::kK, PlaneId::kV};

}  // namespace

SimPool::SimPool(PoolRegistry* registry, uint64_t epoch, PoolLayout layout, std::string id)
    : registry_(registry), epoch_(epoch), layout_(layout), id_(std::move(id)) {
  const std::string zeros(TokenBytes() * layout.block_tokens, '\0');
  model_.assign(layout.num_blocks, Block(size_t{2} * layout.layers, zeros));
  unknown_.assign(layout.num_blocks, false);
}

absl::StatusOr<std::shared_ptr<SimPool>> SimPool::Register(PoolRegistry* registry, uint64_t epoch,
                                                           const PoolLayout& layout, int64_t lease_ms) {
  absl::StatusOr<PoolHandle> handle = registry->Register(kMe, "", MakeSchema(layout), lease_ms);
  if (!handle.ok()) return handle.status();
  return std::shared_ptr<SimPool>(new SimPool(registry, epoch, layout, handle->pool_id));
}

bool SimPool::closing() const {
  return ReasonOf(registry_->GetBlock(kMe, id_, epoch_, 0, 0, PlaneId::kK, 0).status()) == "POOL_CLOSING";
}

bool SimPool::Overwrite(uint64_t block, SimRandom* random) {
  for (size_t i = 0; i < model_[block].size(); ++i) {
    std::string data = model_[block][i];
    // Halves of both signs, from 2^-5 to 2^2: nothing that would be an escape.
    for (size_t at = 0; at + 1 < data.size(); at += 2) {
      const uint64_t bits = random->Next();
      data[at] = static_cast<char>(bits);
      data[at + 1] = static_cast<char>((bits >> 8 & 0x83) | (10 + (bits >> 20) % 8) << 2);
    }
    const auto layer = static_cast<uint32_t>(i / 2);
    if (!registry_->PutBlock(kMe, id_, epoch_, 0, layer, kPlanes[i % 2], block, data).ok()) return false;
    model_[block][i] = std::move(data);
  }
  unknown_[block] = false;
  return true;
}

std::optional<SimPool::Block> SimPool::ReadBlock(uint64_t block) const {
  Block planes;
  for (size_t i = 0; i < model_[block].size(); ++i) {
    absl::StatusOr<std::string> data =
        registry_->GetBlock(kMe, id_, epoch_, 0, static_cast<uint32_t>(i / 2), kPlanes[i % 2], block);
    if (!data.ok()) return std::nullopt;
    planes.push_back(*std::move(data));
  }
  return planes;
}

template <typename BlockOf>
std::vector<std::string> SimPool::Join(const std::vector<BlockRange>& runs, uint32_t tokens, BlockOf block_of) const {
  std::vector<std::string> planes(size_t{2} * layout_.layers);
  for (const BlockRange& run : runs) {
    for (uint64_t block = run.first; block < run.first + run.count; ++block) {
      const std::optional<Block> data = block_of(block);
      if (!data.has_value()) return {};
      for (size_t i = 0; i < planes.size(); ++i) planes[i] += (*data)[i];
    }
  }
  for (std::string& plane : planes) plane.resize(std::min(plane.size(), tokens * TokenBytes()));
  return planes;
}

void SimPool::AcceptWhatIsLate() {
  for (uint64_t block = 0; block < model_.size(); ++block) {
    if (unknown_[block]) Accept(block);
  }
}

std::vector<std::string> SimPool::Read(const std::vector<BlockRange>& runs, uint32_t tokens) const {
  return Join(runs, tokens, [this](uint64_t block) { return ReadBlock(block); });
}

std::vector<std::string> SimPool::Expected(const std::vector<BlockRange>& runs, uint32_t tokens) const {
  return Join(runs, tokens, [this](uint64_t block) { return std::optional<Block>(model_[block]); });
}

void SimPool::Accept(uint64_t block) {
  std::optional<Block> now = ReadBlock(block);
  if (!now.has_value()) return;
  model_[block] = *std::move(now);
  unknown_[block] = false;
}

void SimPool::AcceptLater(const std::vector<BlockRange>& runs) {
  for (const BlockRange& run : runs) {
    for (uint64_t block = run.first; block < run.first + run.count; ++block) unknown_[block] = true;
  }
}

void SimPool::ExpectUntouched(const std::vector<bool>& used, const std::string& what) {
  for (uint64_t block = 0; block < model_.size(); ++block) {
    if (used[block]) continue;
    if (unknown_[block]) Accept(block);
    const std::optional<Block> now = ReadBlock(block);
    if (!now.has_value()) return;  // the pool is lost, or closing
    EXPECT_TRUE(*now == model_[block]) << what << ": block " << block << " was written without leave";
  }
}

}  // namespace spectrumkv
