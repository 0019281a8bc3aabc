// Strided blocks in the memory of a GPU, to and from dense memory of the lane that copies them.
#pragma once

#include "server/memory/device.h"
#include "server/pool/block_copy.h"

namespace spectrumkv {

// Queued on the lane. dense: [block_tokens, heads, head_dim] in pinned or device memory, DenseBytes().
void QueueGather(const TensorPlace& place, uint64_t block, uint8_t* dense, DeviceLane* lane);
void QueueScatter(const TensorPlace& place, uint64_t block, uint8_t* dense, DeviceLane* lane);

// Queued: zero-fills tokens [first_token, block_tokens) of the block, and no other byte.
void QueueZero(const TensorPlace& place, uint64_t block, uint32_t first_token, DeviceLane* lane);

}  // namespace spectrumkv
