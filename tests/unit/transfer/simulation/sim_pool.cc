#include "tests/unit/transfer/simulation/sim_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr PlaneId kPlanes[] = {PlaneId::kK, PlaneId::kV};

// Halves of both signs, from 2^-5 to 2^2: nothing that would be an escape.
void Randomise(SimRandom* random, size_t from, std::string* data) {
  uint64_t bits = 0;
  for (size_t at = from; at + 1 < data->size(); at += 2) {
    bits = (at - from) % 8 == 0 ? random->Next() : bits >> 16;
    (*data)[at] = static_cast<char>(bits);
    (*data)[at + 1] = static_cast<char>((bits >> 8 & 0x83) | (10 + (bits >> 10 & 7)) << 2);
  }
}

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
    Randomise(random, 0, &data);
    const auto layer = static_cast<uint32_t>(i / 2);
    if (!registry_->PutBlock(kMe, id_, epoch_, 0, layer, kPlanes[i % 2], block, data).ok()) return false;
    model_[block][i] = std::move(data);
  }
  unknown_[block] = false;
  return true;
}

bool SimPool::Scribble(uint64_t block, uint32_t first_token, SimRandom* random) {
  auto hold = registry_->HoldSource(kMe, id_, epoch_, {{0, {{block, 1}}}}, layout_.block_tokens);
  if (unknown_[block]) Accept(block);
  if (!hold.ok() || unknown_[block]) return false;
  const size_t cell = size_t{layout_.head_dim} * SizeOf(layout_.dtype);
  const size_t head_stride = layout_.heads_first ? cell * layout_.block_tokens : cell;
  std::vector<uint8_t*> rows(layout_.block_tokens);
  for (size_t i = 0; i < model_[block].size(); ++i) {
    Randomise(random, first_token * TokenBytes(), &model_[block][i]);
    (*hold)->FillRows(0, static_cast<uint32_t>(i / 2), kPlanes[i % 2], 0, layout_.block_tokens, rows.data());
    for (size_t token = first_token; token < rows.size(); ++token) {
      for (size_t head = 0; head < layout_.heads; ++head) {
        std::memcpy(rows[token] + head * head_stride, &model_[block][i][(token * layout_.heads + head) * cell], cell);
      }
    }
  }
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

uint64_t SimPool::AcceptChanges(uint64_t block, const Changed& changed) {
  std::optional<Block> now = ReadBlock(block);
  if (!now.has_value()) return 0;
  uint64_t count = 0;
  for (size_t i = 0; i < now->size() && !unknown_[block]; ++i) {
    if ((*now)[i] == model_[block][i]) continue;
    for (uint32_t token = 0; token < layout_.block_tokens; ++token) {
      const std::string before = model_[block][i].substr(token * TokenBytes(), TokenBytes());
      const std::string after = (*now)[i].substr(token * TokenBytes(), TokenBytes());
      if (before == after) continue;
      changed(i, token, before, after);
      ++count;
    }
  }
  model_[block] = *std::move(now);
  unknown_[block] = false;
  return count;
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
