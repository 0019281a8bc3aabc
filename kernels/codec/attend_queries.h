// What Backend::Attend and the tables behind it are asked.
#pragma once

#include <cstdint>

namespace spectrumkv {

// Queries that read one head of K: head_dim values each, the softmax scale applied. Arithmetic: kernels/codec/attend_math.h.
struct AttendQueries {
  const float* values = nullptr;        // [count, head_dim]
  const uint32_t* positions = nullptr;  // [count]; the key of token t has position t
  uint32_t count = 0;
  uint32_t window = 0;    // keys that a query sees, its own position the last; 0: all before it
  float soft_cap = 0.0f;  // logits become cap * tanh(logit / cap); 0: they stay
};

}  // namespace spectrumkv
