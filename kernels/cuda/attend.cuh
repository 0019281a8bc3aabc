// What recent queries attend to in the keys of a plane, bit for bit as kernels/codec/attend_math.h has it: a matrix product
// with the block's softmax behind it (Attend), the factors of blocks (AttendFactors), the sum over queries (AttendFold).
#pragma once

#include "kernels/codec/attend_math.h"
#include "kernels/cuda/planes.cuh"

namespace spectrumkv::gpu {

// A tile: the tokens of one block, kAttendQueries queries; a thread has the dots of kTileSide of each.
constexpr uint32_t kTileTokens = kAttendTokens / kTileSide;  // threads side by side
static_assert(kAttendThreads == kTileTokens * kAttendQueries / kTileSide);
static_assert(kAttendQueries <= kTileDims, "logits take the place of keys");
static_assert(kAttendTokens == 2 * kWarpLanes, "a warp has a query's block, two tokens a lane");

struct AttendTile {
  uint32_t head;         // of the pass
  uint32_t block;
  uint32_t first_token;  // of the block
  uint32_t tokens;       // that exist
  uint32_t query;        // of the pass, the first
  uint32_t queries;
};

SPECTRUMKV_DEVICE AttendTile TileOf(const AttendArgs& args) {
  const uint32_t tiles = (args.queries + kAttendQueries - 1) / kAttendQueries;
  AttendTile tile;
  tile.query = blockIdx.x % tiles * kAttendQueries;
  tile.block = blockIdx.x / tiles % args.blocks;
  tile.head = blockIdx.x / tiles / args.blocks;
  tile.first_token = tile.block * kAttendTokens;
  const uint32_t tokens = args.tokens - tile.first_token, queries = args.queries - tile.query;
  tile.tokens = tokens < kAttendTokens ? tokens : kAttendTokens;
  tile.queries = queries < kAttendQueries ? queries : kAttendQueries;
  return tile;
}

// Of one query and one block: where its weights, its top and its sum lie.
SPECTRUMKV_DEVICE uint64_t RowOf(const AttendArgs& args, uint32_t head, uint32_t block, uint32_t query) {
  return (static_cast<uint64_t>(head) * args.blocks + block) * args.queries + query;
}

SPECTRUMKV_DEVICE uint8_t* BytesOf(const float* at) {
  return reinterpret_cast<uint8_t*>(const_cast<float*>(at));
}
SPECTRUMKV_DEVICE float LoadFloat(const float* from) { return LoadAs<float>(BytesOf(from)); }
SPECTRUMKV_DEVICE void StoreFloat(float* to, float value) { StoreAs<float>(BytesOf(to), value); }

SPECTRUMKV_DEVICE SeenTokens SeenBy(const AttendArgs& args, const AttendTile& tile, uint32_t query) {
  const uint32_t position = LoadAs<uint32_t>(
      reinterpret_cast<const uint8_t*>(args.positions + args.query_first + tile.query + query));
  return SeenOf(position, args.window, tile.first_token, tile.tokens);
}

// Dims [dim, dim + kTileDims) of the block's keys, tokens side by side; 0 for what is not there.
template <DType kType>
SPECTRUMKV_DEVICE void FillKeys(const AttendArgs& args, const AttendTile& tile, uint32_t dim,
                                float (*keys)[kAttendTokens]) {
  constexpr uint32_t kUnits = kTileDims / kLaneValues;
  for (uint32_t i = threadIdx.x; i < kAttendTokens * kUnits; i += kAttendThreads) {
    const uint32_t token = i / kUnits, at = i % kUnits * kLaneValues;
    Words<kType> words{};
    if (token < tile.tokens && dim + at < args.head_dim) {
      const uint8_t* cell = TokenAt(args.plane, tile.first_token + token) +
                            static_cast<int64_t>(args.head_first + tile.head) * args.plane.head_stride_bytes;
      words = LoadWords<kType>(cell + (dim + at) * args.plane.dim_stride_bytes, args.plane.dim_stride_bytes);
    }
    SPECTRUMKV_UNROLL
    for (int n = 0; n < static_cast<int>(kLaneValues); ++n) keys[at + n][token] = ValueAt(words, n);
  }
}

// The same of the tile's queries.
SPECTRUMKV_DEVICE void FillQueries(const AttendArgs& args, const AttendTile& tile, uint32_t dim,
                                   float (*queries)[kAttendQueries]) {
  constexpr uint32_t kUnits = kTileDims / kTileSide;
  const uint64_t first = static_cast<uint64_t>(args.head_first + tile.head) * args.query_count + args.query_first + tile.query;
  for (uint32_t i = threadIdx.x; i < kAttendQueries * kUnits; i += kAttendThreads) {
    const uint32_t query = i / kUnits, at = i % kUnits * kTileSide;
    uint4 four = make_uint4(0, 0, 0, 0);
    if (query < tile.queries && dim + at < args.head_dim) {
      four = LoadAs<uint4>(BytesOf(args.values + (first + query) * args.head_dim + dim + at));
    }
    queries[at][query] = BitsFloat(four.x);
    queries[at + 1][query] = BitsFloat(four.y);
    queries[at + 2][query] = BitsFloat(four.z);
    queries[at + 3][query] = BitsFloat(four.w);
  }
}

struct FourFloats {
  float f[kTileSide];
};
SPECTRUMKV_DEVICE FourFloats LoadFour(const float* from) {
  const uint4 four = LoadShared<uint4>(reinterpret_cast<const uint8_t*>(from));
  return FourFloats{{BitsFloat(four.x), BitsFloat(four.y), BitsFloat(four.z), BitsFloat(four.w)}};
}

// dots += query * key over the dims in shared memory, in their order.
SPECTRUMKV_DEVICE void AddDots(const float (*keys)[kAttendTokens], const float (*queries)[kAttendQueries], uint32_t dims,
                               float (&dots)[kTileSide][kTileSide]) {
  const uint32_t token = threadIdx.x % kTileTokens * kTileSide, query = threadIdx.x / kTileTokens * kTileSide;
  for (uint32_t d = 0; d < dims; ++d) {
    const FourFloats k = LoadFour(&keys[d][token]), q = LoadFour(&queries[d][query]);
    SPECTRUMKV_UNROLL
    for (int i = 0; i < static_cast<int>(kTileSide); ++i) {
      SPECTRUMKV_UNROLL
      for (int j = 0; j < static_cast<int>(kTileSide); ++j) dots[i][j] = FusedMultiplyAdd(q.f[i], k.f[j], dots[i][j]);
    }
  }
}

SPECTRUMKV_DEVICE float LogitOf(const AttendArgs& args, float dot, bool seen) {
  if (!seen || !(dot >= -kMaxLogit && dot <= kMaxLogit)) return kHiddenLogit;
  return args.soft_cap == 0.0f ? dot : SoftCap(dot, args.soft_cap, args.inverse_cap);
}

SPECTRUMKV_DEVICE float LargerOf(float a, float b) { return a > b ? a : b; }

// The block's softmax of one query, by a warp: its dots become weights. Called by all lanes.
SPECTRUMKV_DEVICE void WeighQuery(const AttendArgs& args, const AttendTile& tile, uint32_t query, const float* dots) {
  const uint32_t lane = threadIdx.x % kWarpLanes;
  const SeenTokens seen = SeenBy(args, tile, query);
  const uint32_t upper = lane + kWarpLanes;
  const float low = LogitOf(args, dots[lane], lane >= seen.first && lane < seen.last);
  const float high = LogitOf(args, dots[upper], upper >= seen.first && upper < seen.last);
  float top = LargerOf(low, high);
  for (int step = kWarpLanes / 2; step != 0; step /= 2) {
    top = LargerOf(top, __shfl_xor_sync(kAllLanes, top, step));
  }
  const float weights[2] = {low == kHiddenLogit ? 0.0f : ExpOf(low - top), high == kHiddenLogit ? 0.0f : ExpOf(high - top)};
  float sum = weights[0] + weights[1];
  for (int step = kWarpLanes / 2; step != 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  const uint64_t row = RowOf(args, tile.head, tile.block, tile.query + query);
  StoreFloat(args.weights + row * kAttendTokens + lane, weights[0]);
  StoreFloat(args.weights + row * kAttendTokens + upper, weights[1]);
  if (lane != 0) return;
  StoreFloat(args.tops + row, top);
  StoreFloat(args.sums + row, sum);
}

// One block of threads for each tile.
template <DType kType>
SPECTRUMKV_KERNEL(kAttendThreads)
Attend(const AttendArgs args) {
  __shared__ __align__(16) float keys[kTileDims][kAttendTokens];
  __shared__ __align__(16) float queries[kTileDims][kAttendQueries];
  const AttendTile tile = TileOf(args);
  bool seen = false;
  for (uint32_t query = 0; query < tile.queries; ++query) {
    const SeenTokens tokens = SeenBy(args, tile, query);
    seen = seen || tokens.first < tokens.last;
  }
  if (!seen) {  // by none of them: the whole block
    if (threadIdx.x < tile.queries) {
      StoreFloat(args.tops + RowOf(args, tile.head, tile.block, tile.query + threadIdx.x), kHiddenLogit);
    }
    return;
  }
  float dots[kTileSide][kTileSide] = {};
  for (uint32_t dim = 0; dim < args.head_dim; dim += kTileDims) {
    FillKeys<kType>(args, tile, dim, keys);
    FillQueries(args, tile, dim, queries);
    __syncthreads();
    AddDots(keys, queries, args.head_dim - dim < kTileDims ? args.head_dim - dim : kTileDims, dots);
    __syncthreads();
  }
  SPECTRUMKV_UNROLL
  for (int i = 0; i < static_cast<int>(kTileSide); ++i) {
    float* row = &keys[threadIdx.x / kTileTokens * kTileSide + i][threadIdx.x % kTileTokens * kTileSide];
    StoreShared<uint4>(reinterpret_cast<uint8_t*>(row), make_uint4(FloatBits(dots[i][0]), FloatBits(dots[i][1]),
                                                                   FloatBits(dots[i][2]), FloatBits(dots[i][3])));
  }
  __syncthreads();
  for (uint32_t query = threadIdx.x / kWarpLanes; query < tile.queries; query += kAttendThreads / kWarpLanes) {
    WeighQuery(args, tile, query, keys[query]);
  }
}

// A thread for each query of each head: sums become factors.
template <uint32_t kThreads>
SPECTRUMKV_KERNEL(kThreads)
AttendFactors(const AttendArgs args) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t head = thread / args.queries, query = thread % args.queries;
  if (head >= args.heads) return;
  float top = kHiddenLogit, sum = 0.0f;
  for (uint32_t block = 0; block < args.blocks; ++block) {
    top = LargerOf(LoadFloat(args.tops + RowOf(args, head, block, query)), top);
  }
  for (uint32_t block = 0; block < args.blocks; ++block) {
    const uint64_t row = RowOf(args, head, block, query);
    const float of_block = LoadFloat(args.tops + row);
    if (of_block != kHiddenLogit) sum = FusedMultiplyAdd(LoadFloat(args.sums + row), ExpOf(of_block - top), sum);
  }
  for (uint32_t block = 0; block < args.blocks; ++block) {
    const uint64_t row = RowOf(args, head, block, query);
    const float of_block = LoadFloat(args.tops + row);
    StoreFloat(args.sums + row, of_block == kHiddenLogit ? 0.0f : ExpOf(of_block - top) / sum);
  }
}

// A thread for each token of each head; passes over later queries go on from the scores of earlier ones.
template <uint32_t kThreads>
SPECTRUMKV_KERNEL(kThreads)
AttendFold(const AttendArgs args) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t head = thread / args.tokens, token = thread % args.tokens;
  if (head >= args.heads) return;
  float* const score = args.scores + static_cast<uint64_t>(args.head_first + head) * args.tokens + token;
  float sum = args.query_first == 0 ? 0.0f : LoadFloat(score);
  for (uint32_t query = 0; query < args.queries; ++query) {
    const uint64_t row = RowOf(args, head, token / kAttendTokens, query);
    const float factor = LoadFloat(args.sums + row);
    if (factor == 0.0f) continue;
    sum = FusedMultiplyAdd(LoadFloat(args.weights + row * kAttendTokens + token % kAttendTokens), factor, sum);
  }
  StoreFloat(score, sum);
}

}  // namespace spectrumkv::gpu
