// Texts that trials are made of.
#pragma once

#include <cstddef>

namespace spectrumkv {

// A text that is cut in two: the model reads the first part and is compared on the second.
struct Passage {
  const char* head;
  const char* tail;
};

inline constexpr size_t kPassages = 4;
extern const Passage kProse[kPassages];
extern const Passage kPrograms[kPassages];

}  // namespace spectrumkv
