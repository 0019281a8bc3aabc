#include "server/pool/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "server/pool/block_copy.h"
#include "server/pool/device_copy.h"

namespace spectrumkv {
namespace {

// What is copied to or from a GPU at a time, in memory that its lane keeps.
constexpr uint64_t kPieceBytes = 1 << 20;

// Rows that follow each other at one distance, as a block of so many tokens.
struct RowRun {
  TensorPlace place;
  uint64_t dense_offset;
};

std::vector<RowRun> RunsOfRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count) {
  const GroupSchema& group = hold.schema().groups[tensor.group];
  const LayerSchema& layer = group.layers[tensor.layer_slot];
  const TensorSchema& strides = tensor.plane == PlaneId::kV ? *layer.v : layer.k;
  std::vector<uint8_t*> rows(count);
  hold.FillRows(tensor.group, tensor.layer_slot, tensor.plane, token_first, count, rows.data());
  std::vector<RowRun> runs;
  const uint64_t row_bytes = DenseRowBytes(hold, tensor);
  for (uint32_t i = 0; i < count; ++i) {
    if (i > 0 && rows[i] == rows[i - 1] + strides.token_stride_bytes) {
      ++runs.back().place.block_tokens;
      continue;
    }
    TensorPlace place{rows[i], 0, strides.token_stride_bytes, strides.head_stride_bytes, strides.dim_stride_bytes};
    place.block_tokens = 1;
    place.heads = group.head_count;
    place.head_dim = group.head_dim;
    place.element_bytes = SizeOf(group.dtype);
    runs.push_back({place, i * row_bytes});
  }
  return runs;
}

absl::Status CopyDeviceRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count,
                            uint8_t* to, const uint8_t* from) {
  auto lane = hold.device()->TakeLane();
  if (!lane.ok()) return lane.status();
  const uint64_t row_bytes = DenseRowBytes(hold, tensor);
  const auto tokens_max = static_cast<uint32_t>(std::max<uint64_t>(1, kPieceBytes / row_bytes));
  uint8_t* const pinned = lane->Pinned(std::min(tokens_max, count) * row_bytes);
  if (pinned == nullptr) return lane->Finish();
  for (uint32_t done = 0; done < count; done += tokens_max) {
    const uint32_t now = std::min(tokens_max, count - done);
    if (from != nullptr) std::memcpy(pinned, from + done * row_bytes, now * row_bytes);
    for (const RowRun& run : RunsOfRows(hold, tensor, token_first + done, now)) {
      if (from != nullptr) {
        QueueScatter(run.place, 0, pinned + run.dense_offset, &*lane);
      } else {
        QueueGather(run.place, 0, pinned + run.dense_offset, &*lane);
      }
    }
    if (absl::Status finished = lane->Finish(); !finished.ok()) return finished;
    if (to != nullptr) std::memcpy(to + done * row_bytes, pinned, now * row_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

PoolSchema DenseSchema(PoolSchema schema) {
  for (GroupSchema& group : schema.groups) {
    const auto dense = [&group](TensorSchema* tensor) {
      tensor->dim_stride_bytes = SizeOf(group.dtype);
      tensor->head_stride_bytes = group.head_dim * tensor->dim_stride_bytes;
      tensor->token_stride_bytes = group.head_count * tensor->head_stride_bytes;
    };
    for (LayerSchema& layer : group.layers) {
      dense(&layer.k);
      if (layer.v.has_value()) dense(&*layer.v);
    }
  }
  return schema;
}

uint64_t DenseRowBytes(const BlockHold& hold, const TensorOfHold& tensor) {
  const GroupSchema& group = hold.schema().groups[tensor.group];
  return uint64_t{group.head_count} * group.head_dim * SizeOf(group.dtype);
}

absl::Status ReadRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count, uint8_t* dense) {
  if (hold.device() != nullptr) return CopyDeviceRows(hold, tensor, token_first, count, dense, nullptr);
  for (const RowRun& run : RunsOfRows(hold, tensor, token_first, count)) {
    GatherBlock(run.place, 0, dense + run.dense_offset);
  }
  return absl::OkStatus();
}

absl::Status WriteRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count,
                       const uint8_t* dense) {
  if (hold.device() != nullptr) return CopyDeviceRows(hold, tensor, token_first, count, nullptr, dense);
  for (const RowRun& run : RunsOfRows(hold, tensor, token_first, count)) {
    ScatterBlock(run.place, 0, dense + run.dense_offset);
  }
  return absl::OkStatus();
}

}  // namespace spectrumkv
