// Who uses which blocks of a PoolCore: holds, and copies in and out.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/base/status.h"
#include "server/pool/device_copy.h"
#include "server/pool/hold.h"
#include "server/pool/pool_core.h"

namespace spectrumkv {
namespace {

absl::Status BlockError(absl::StatusCode code, const std::string& reason, size_t group, uint64_t block,
                        const std::string& what) {
  return MakeError(code, reason, "groups[" + std::to_string(group) + "] block " + std::to_string(block) + " " + what,
                   {{"group", std::to_string(group)}, {"block", std::to_string(block)}});
}

absl::Status NoPlace(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_BLOCKS", message);
}

}  // namespace

// All or nothing: on an error no use is left.
absl::Status PoolCore::TakeLocked(const BlockIds& ids, bool exclusive) {
  for (size_t g = 0; g < ids.size(); ++g) {
    for (const uint32_t block : ids[g]) {
      if (exclusive ? use_[g].IsFree(block) : !use_[g].IsReserved(block)) continue;
      return exclusive ? BlockError(absl::StatusCode::kFailedPrecondition, "BLOCKS_IN_USE", g, block,
                                    "is used by another transfer")
                       : BlockError(absl::StatusCode::kFailedPrecondition, "BLOCKS_RESERVED", g, block,
                                    "is the destination of a transfer");
    }
  }
  if (!exclusive) {
    for (size_t g = 0; g < ids.size(); ++g) {
      for (const uint32_t block : ids[g]) use_[g].Share(block);
    }
    return absl::OkStatus();
  }
  for (size_t g = 0; g < ids.size(); ++g) {
    for (size_t i = 0; i < ids[g].size(); ++i) {
      const uint32_t block = ids[g][i];
      if (use_[g].IsFree(block)) {
        use_[g].Reserve(block);
        continue;
      }
      for (size_t j = 0; j < i; ++j) use_[g].Unreserve(ids[g][j]);
      for (size_t h = 0; h < g; ++h) {
        for (const uint32_t taken : ids[h]) use_[h].Unreserve(taken);
      }
      return BlockError(absl::StatusCode::kInvalidArgument, "INVALID_BLOCKS", g, block,
                        "is listed twice in one destination");
    }
  }
  return absl::OkStatus();
}

void PoolCore::GiveBackLocked(const BlockIds& ids, bool exclusive) {
  for (size_t g = 0; g < ids.size(); ++g) {
    for (const uint32_t block : ids[g]) exclusive ? use_[g].Unreserve(block) : use_[g].Unshare(block);
  }
}

absl::StatusOr<std::unique_ptr<BlockHold>> PoolCore::Hold(const std::vector<GroupBlockList>& blocks,
                                                          uint32_t token_count, bool exclusive) {
  auto table = ExpandBlocks(schema_, blocks, token_count);
  if (!table.ok()) return table.status();
  auto notice = std::make_shared<LostNotice>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status status = CheckUsableLocked(); !status.ok()) return status;
    if (absl::Status status = TakeLocked(table->ids, exclusive); !status.ok()) return status;
    ++users_;
    (exclusive ? target_notices_ : source_notices_).insert(notice);
  }
  return std::unique_ptr<BlockHold>(
      std::make_unique<PoolHold>(shared_from_this(), *std::move(table), token_count, exclusive, std::move(notice)));
}

void PoolCore::ReleaseHold(const BlockIds& ids, bool exclusive, const std::shared_ptr<LostNotice>& notice) {
  std::unique_lock<std::mutex> lock(mutex_);
  GiveBackLocked(ids, exclusive);
  (exclusive ? target_notices_ : source_notices_).erase(notice);
  --users_;
  FinishIfIdle(std::move(lock));
}

absl::StatusOr<const TensorPlace*> PoolCore::FindPlace(uint32_t group, uint32_t layer, PlaneId plane,
                                                       uint64_t block) const {
  if (group >= schema_.groups.size()) {
    return NoPlace("group " + std::to_string(group) + ": the pool has " + std::to_string(schema_.groups.size()));
  }
  const GroupSchema& geometry = schema_.groups[group];
  const auto found = std::find_if(geometry.layers.begin(), geometry.layers.end(),
                                  [layer](const LayerSchema& l) { return l.layer == layer; });
  if (found == geometry.layers.end()) {
    return NoPlace("layer " + std::to_string(layer) + " is not in group " + std::to_string(group));
  }
  if (plane == PlaneId::kV && !found->v) return NoPlace("layer " + std::to_string(layer) + " has no V plane");
  if (block >= geometry.num_blocks) {
    return BlockError(absl::StatusCode::kNotFound, "UNKNOWN_BLOCK", group, block,
                      "is not one of " + std::to_string(geometry.num_blocks));
  }
  return &place(group, static_cast<uint32_t>(found - geometry.layers.begin()), plane);
}

absl::Status PoolCore::WriteBlock(const TensorPlace& place, uint64_t block, const std::string& data) {
  if (device_ == nullptr) {
    ScatterBlock(place, block, reinterpret_cast<const uint8_t*>(data.data()));
    return absl::OkStatus();
  }
  auto lane = device_->TakeLane();
  if (!lane.ok()) return lane.status();
  uint8_t* const staged = lane->Pinned(data.size());
  if (staged != nullptr) {
    std::copy(data.begin(), data.end(), staged);
    QueueScatter(place, block, staged, &*lane);
  }
  return lane->Finish();
}

absl::Status PoolCore::ReadBlock(const TensorPlace& place, uint64_t block, std::string* data) {
  if (device_ == nullptr) {
    GatherBlock(place, block, reinterpret_cast<uint8_t*>(data->data()));
    return absl::OkStatus();
  }
  auto lane = device_->TakeLane();
  if (!lane.ok()) return lane.status();
  uint8_t* const staged = lane->Pinned(data->size());
  if (staged != nullptr) QueueGather(place, block, staged, &*lane);
  const absl::Status read = lane->Finish();
  if (read.ok()) std::memcpy(data->data(), staged, data->size());
  return read;
}

absl::Status PoolCore::PutBlock(uint32_t group, uint32_t layer, PlaneId plane, uint64_t block,
                                const std::string& data) {
  const auto place = FindPlace(group, layer, plane, block);
  if (!place.ok()) return place.status();
  if (data.size() != (*place)->DenseBytes()) {
    return NoPlace("block data has " + std::to_string(data.size()) + " bytes, a block has " +
                   std::to_string((*place)->DenseBytes()));
  }
  std::lock_guard<std::mutex> io_lock(io_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status status = CheckUsableLocked((*place)->segment); !status.ok()) return status;
    if (!use_[group].IsFree(block)) {
      return BlockError(absl::StatusCode::kFailedPrecondition, "BLOCKS_IN_USE", group, block, "is used by a transfer");
    }
    use_[group].Reserve(block);
    ++users_;
  }
  absl::Status health = WriteBlock(**place, block, data);
  if (health.ok()) health = Health();
  std::unique_lock<std::mutex> lock(mutex_);
  use_[group].Unreserve(block);
  --users_;
  FinishIfIdle(std::move(lock));
  return health;
}

absl::StatusOr<std::string> PoolCore::GetBlock(uint32_t group, uint32_t layer, PlaneId plane, uint64_t block) {
  const auto place = FindPlace(group, layer, plane, block);
  if (!place.ok()) return place.status();
  std::string data((*place)->DenseBytes(), '\0');
  std::lock_guard<std::mutex> io_lock(io_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status status = CheckUsableLocked((*place)->segment); !status.ok()) return status;
    if (use_[group].IsReserved(block)) {
      return BlockError(absl::StatusCode::kFailedPrecondition, "BLOCKS_RESERVED", group, block,
                        "is the destination of a transfer");
    }
    use_[group].Share(block);
    ++users_;
  }
  absl::Status health = ReadBlock(**place, block, &data);
  if (health.ok()) health = Health();
  std::unique_lock<std::mutex> lock(mutex_);
  use_[group].Unshare(block);
  --users_;
  FinishIfIdle(std::move(lock));
  if (!health.ok()) return health;
  return data;
}

}  // namespace spectrumkv
