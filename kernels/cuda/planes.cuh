// Values in paged memory: eight of them a lane, by one 128-bit access where alignment and stride allow.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/device.cuh"

namespace spectrumkv::gpu {

// The words of eight neighbouring values.
template <DType kType>
struct Words {
  static constexpr int kCount = kType == DType::kFloat32 ? 8 : 4;
  uint32_t w[kCount];
};

template <DType kType>
SPECTRUMKV_DEVICE uint32_t WordAt(const Words<kType>& words, int i) {
  if constexpr (kType == DType::kFloat32) {
    return words.w[i];
  } else {
    return words.w[i / 2] >> (16 * (i & 1)) & 0xFFFF;
  }
}

template <DType kType>
SPECTRUMKV_DEVICE void SetWord(Words<kType>* words, int i, uint32_t word) {
  if constexpr (kType == DType::kFloat32) {
    words->w[i] = word;
  } else {
    words->w[i / 2] = (i & 1) == 0 ? word : words->w[i / 2] | word << 16;  // in ascending order
  }
}

template <DType kType>
SPECTRUMKV_DEVICE float ValueAt(const Words<kType>& words, int i) {
  const uint32_t word = WordAt(words, i);
  if constexpr (kType == DType::kFloat16) {
    return WidenHalf(word);
  } else if constexpr (kType == DType::kBFloat16) {
    return BfloatToFloat(word);
  } else {
    return BitsFloat(word);
  }
}

// The word with its sign cleared.
template <DType kType>
SPECTRUMKV_DEVICE uint32_t MagnitudeAt(const Words<kType>& words, int i) {
  return WordAt(words, i) & (kType == DType::kFloat32 ? 0x7FFFFFFFu : 0x7FFFu);
}

// narrow of the specification. REQUIRES: x is not NaN.
template <DType kType>
SPECTRUMKV_DEVICE uint32_t NarrowTo(float x) {
  if constexpr (kType == DType::kFloat16) {
    const uint32_t half = RoundToHalf(x);
    return (half & 0x7FFF) >= kHalfInf ? (half & 0x8000) | kHalfMax : half;
  } else if constexpr (kType == DType::kBFloat16) {
    return NarrowBfloat(x);
  } else {
    return FloatBits(x);
  }
}

template <DType kType>
SPECTRUMKV_DEVICE uint32_t LoadWord(const uint8_t* from) {
  if constexpr (kType == DType::kFloat32) {
    if (AddressOf(from) % 4 == 0) return LoadAs<uint32_t>(from);
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(LoadAs<uint8_t>(from + i)) << (8 * i);
    return word;
  } else {
    if (AddressOf(from) % 2 == 0) return LoadAs<uint16_t>(from);
    return LoadAs<uint8_t>(from) | static_cast<uint32_t>(LoadAs<uint8_t>(from + 1)) << 8;
  }
}

template <DType kType>
SPECTRUMKV_DEVICE void StoreWord(uint8_t* to, uint32_t word) {
  constexpr int kBytes = kType == DType::kFloat32 ? 4 : 2;
  if (AddressOf(to) % kBytes == 0) {
    if constexpr (kBytes == 4) {
      StoreAs<uint32_t>(to, word);
    } else {
      StoreAs<uint16_t>(to, static_cast<uint16_t>(word));
    }
    return;
  }
  for (int i = 0; i < kBytes; ++i) StoreAs<uint8_t>(to + i, static_cast<uint8_t>(word >> (8 * i)));
}

// Eight words that lie together at a multiple of 16.
template <DType kType>
SPECTRUMKV_DEVICE Words<kType> LoadWhole(const uint8_t* from) {
  Words<kType> words;
  SPECTRUMKV_UNROLL
  for (int i = 0; i < Words<kType>::kCount; i += 4) {
    const uint4 four = LoadAs<uint4>(from + 4 * i);
    words.w[i] = four.x;
    words.w[i + 1] = four.y;
    words.w[i + 2] = four.z;
    words.w[i + 3] = four.w;
  }
  return words;
}

template <DType kType>
SPECTRUMKV_DEVICE void StoreWhole(uint8_t* to, const Words<kType>& words) {
  SPECTRUMKV_UNROLL
  for (int i = 0; i < Words<kType>::kCount; i += 4) {
    StoreAs<uint4>(to + 4 * i, make_uint4(words.w[i], words.w[i + 1], words.w[i + 2], words.w[i + 3]));
  }
}

template <DType kType>
SPECTRUMKV_DEVICE bool IsWhole(const uint8_t* at, int64_t dim_stride_bytes) {
  return dim_stride_bytes == static_cast<int64_t>(SizeOf(kType)) && AddressOf(at) % 16 == 0;
}

template <DType kType>
SPECTRUMKV_DEVICE Words<kType> LoadWords(const uint8_t* from, int64_t dim_stride_bytes) {
  if (IsWhole<kType>(from, dim_stride_bytes)) return LoadWhole<kType>(from);
  Words<kType> words;
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    SetWord(&words, i, LoadWord<kType>(from + i * dim_stride_bytes));
  }
  return words;
}

template <DType kType>
SPECTRUMKV_DEVICE void StoreWords(uint8_t* to, int64_t dim_stride_bytes, const Words<kType>& words) {
  if (IsWhole<kType>(to, dim_stride_bytes)) return StoreWhole<kType>(to, words);
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kLaneValues); ++i) {
    StoreWord<kType>(to + i * dim_stride_bytes, WordAt(words, i));
  }
}

// K or V. Field by field: a copy of a whole struct may go by way of local memory.
SPECTRUMKV_DEVICE DevicePlane PlaneOf(const ChunkArgs& args, uint32_t plane) {
  const bool v = plane != 0;
  DevicePlane chosen;
  chosen.base = v ? args.v.base : args.k.base;
  chosen.runs = v ? args.v.runs : args.k.runs;
  chosen.run_count = v ? args.v.run_count : args.k.run_count;
  chosen.token_stride_bytes = v ? args.v.token_stride_bytes : args.k.token_stride_bytes;
  chosen.head_stride_bytes = v ? args.v.head_stride_bytes : args.k.head_stride_bytes;
  chosen.dim_stride_bytes = v ? args.v.dim_stride_bytes : args.k.dim_stride_bytes;
  return chosen;
}

// Head 0 of a token: the last run that does not begin after it.
SPECTRUMKV_DEVICE uint8_t* TokenAt(const DevicePlane& plane, uint32_t token) {
  AssumeGlobal(plane.runs);
  uint32_t first = 0, count = plane.run_count;
  while (count > 1) {
    const uint32_t half = count / 2;
    const bool later = plane.runs[first + half].first_token <= token;
    first = later ? first + half : first;
    count = later ? count - half : half;
  }
  const TokenRun run = plane.runs[first];
  return plane.base + run.offset_bytes + (token - run.first_token) * plane.token_stride_bytes;
}

// One cell (plane, token, head), and this lane's place among the lanes that share it.
struct CellOfLane {
  bool live;  // false: a lane beyond the last cell; it takes part in collectives and in nothing else
  uint32_t plane;
  uint32_t token;
  uint32_t head;
  uint32_t lane;   // in the cell
  uint32_t group;  // of the warp
};

// This block's chunk. One that needs fewer blocks than others has some without work.
SPECTRUMKV_DEVICE const ChunkArgs& ChunkOf(const BatchArgs& batch) { return batch.chunks[blockIdx.y]; }

// Cells in the order of the chunk, cell_lanes lanes each. `planes` and `rows` [planes, rows, heads].
SPECTRUMKV_DEVICE CellOfLane CellOf(const ChunkArgs& args, uint32_t planes, uint32_t rows) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t cell = thread / args.cell_lanes;
  CellOfLane mine;
  mine.live = cell < planes * rows * args.heads;
  mine.lane = thread % args.cell_lanes;
  mine.group = threadIdx.x % kWarpLanes / args.cell_lanes;
  mine.head = cell % args.heads;
  const uint32_t row = cell / args.heads;
  mine.plane = row >= rows ? 1 : 0;
  mine.token = mine.plane != 0 ? row - rows : row;
  return mine;
}

SPECTRUMKV_DEVICE Tier TierAt(const ChunkArgs& args, uint32_t token, uint32_t plane) {
  return static_cast<Tier>(args.work.tiers[token] >> (4 * plane) & 15);
}

// Largest of the lanes that share a cell. Called by all lanes of the warp.
SPECTRUMKV_DEVICE uint32_t CellMax(uint32_t value, uint32_t cell_lanes) {
  for (uint32_t step = cell_lanes / 2; step != 0; step /= 2) {
    value = MaxOf(value, __shfl_xor_sync(kAllLanes, value, static_cast<int>(step)));
  }
  return value;
}

}  // namespace spectrumkv::gpu
