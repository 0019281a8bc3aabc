// Do two strided tensors share a byte? Exactly, in a bounded number of steps. See overlap.h for what a lattice is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "server/pool/overlap.h"

namespace spectrumkv {

// A nested lattice as runs of bytes: dims that continue each other are one, greatest stride first.
struct MeetShape {
  struct Dim {
    int64_t stride = 0, extent = 0;
  };
  int64_t offset = 0;
  int64_t run = 0;  // bytes
  std::array<Dim, 4> dims{};
  size_t dim_count = 0;
  std::array<int64_t, 5> spans{};  // of dims[i...] and the run
};

// REQUIRES: nested, offset + span below 2^62.
MeetShape MeetShapeOf(const Lattice& lattice);

enum class Meeting { kApart, kMeets, kUndecided };

// Takes its steps from `steps_left`; kUndecided when they are used up.
Meeting Meet(const MeetShape& a, const MeetShape& b, uint64_t* steps_left);

}  // namespace spectrumkv
