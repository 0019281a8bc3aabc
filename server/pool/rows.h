// Rows of one tensor of a hold, to and from dense host memory, whatever its layout and wherever it lies.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "server/pool/pool.h"

namespace spectrumkv {

// groups[group].layers[layer_slot], K or V.
struct TensorOfHold {
  uint32_t group = 0;
  uint32_t layer_slot = 0;
  PlaneId plane = PlaneId::kK;
};

// The same tensors with the strides of dense rows; where blocks lie means nothing in it.
PoolSchema DenseSchema(PoolSchema schema);

// Of one token, dense: heads * head_dim elements.
uint64_t DenseRowBytes(const BlockHold& hold, const TensorOfHold& tensor);

// dense: [count, heads, head_dim] in the pool's data type. REQUIRES: as BlockHold::FillRows. Of a GPU they block until the
// bytes are there, and tell its errors; on the host they are always OK.
absl::Status ReadRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count, uint8_t* dense);
absl::Status WriteRows(const BlockHold& hold, const TensorOfHold& tensor, uint32_t token_first, uint32_t count,
                       const uint8_t* dense);

}  // namespace spectrumkv
