// The second pass: where each cell's codes and scales lie, by prefix sums over the tier map. One block of threads for a chunk.
#pragma once

#include "kernels/cuda/planes.cuh"

namespace spectrumkv::gpu {

// Tokens of a plane by tier, 16 bits each (2 * 4096 fit): tiers 0..3, tiers 4..6 and, as the eighth, keys of a rotated
// tier. Sums of two are the sums of each, so one prefix sum does for all.
struct TierTally {
  unsigned long long low, high;
};

constexpr uint32_t kRotatedKeys = 7;  // beside the tiers 0..6

SPECTRUMKV_DEVICE uint32_t TallyAt(const TierTally& tally, uint32_t index) {
  return static_cast<uint32_t>((index < 4 ? tally.low : tally.high) >> (16 * (index & 3)) & 0xFFFF);
}

SPECTRUMKV_DEVICE void Count(TierTally* tally, uint32_t index) {
  const unsigned long long one = 1ull << (16 * (index & 3));
  tally->low += index < 4 ? one : 0;
  tally->high += index < 4 ? 0 : one;
}

SPECTRUMKV_DEVICE uint32_t Scales8Of(const TierTally& tally) {
  return TallyAt(tally, 2) + TallyAt(tally, 3) + TallyAt(tally, 4);
}
SPECTRUMKV_DEVICE uint32_t Scales16Of(const TierTally& tally) {
  return TallyAt(tally, 1) + TallyAt(tally, 5) + TallyAt(tally, 6);
}

// CellBytes of kernels/format/chunk.h.
SPECTRUMKV_DEVICE uint32_t CellCodeBytes(Tier tier, uint32_t head_dim, uint32_t word_bytes) {
  switch (tier) {
    case Tier::kRaw: return head_dim * word_bytes;
    case Tier::kP8:
    case Tier::kQ8: return head_dim;
    case Tier::kP4:
    case Tier::kQ4: return head_dim / 2;
    case Tier::kQ3: return head_dim / 4 + head_dim / 8;
    default: return head_dim / 4;
  }
}

SPECTRUMKV_DEVICE uint32_t WordBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The sections of a chunk: LayoutOf of kernels/format/chunk.h. Begins and ends (without padding), in wire order; the
// codes of a tier are section kFirstCodes + its CodeSection.
constexpr uint32_t kFirstCodes = 5, kSections = kFirstCodes + kCodeSections;
struct Sections {
  uint64_t begin[kSections];
  uint64_t end[kSections];
  uint64_t chunk_bytes;
};

SPECTRUMKV_DEVICE uint32_t CodesOf(Tier tier) {
  switch (tier) {
    case Tier::kRaw: return kFirstCodes + kCodesRaw;
    case Tier::kQ8: return kFirstCodes + kCodesQ8;
    case Tier::kP8: return kFirstCodes + kCodesP8;
    case Tier::kP4: return kFirstCodes + kCodesP4;
    case Tier::kQ4: return kFirstCodes + kCodesQ4;
    case Tier::kQ3: return kFirstCodes + kCodesQ3;
    default: return kFirstCodes + kCodesQ2;
  }
}

SPECTRUMKV_DEVICE uint64_t Place(Sections* sections, uint32_t section, uint64_t at, uint64_t bytes) {
  sections->begin[section] = at;
  sections->end[section] = at + bytes;
  return at + (bytes + 15) / 16 * 16;
}

SPECTRUMKV_DEVICE void PlaceSections(const ChunkArgs& args, const TierTally& total, Sections* sections) {
  const uint64_t heads = args.heads;
  const uint64_t centres = TallyAt(total, kRotatedKeys) == 0 ? 0 : (args.tokens + kCentreTokens - 1) / kCentreTokens;
  uint64_t at = Place(sections, 0, kHeaderBytes, args.tokens);
  at = Place(sections, 1, at, centres * heads * 2);
  at = Place(sections, 2, at, centres * heads * args.head_dim);
  at = Place(sections, 3, at, Scales8Of(total) * heads);
  at = Place(sections, 4, at, Scales16Of(total) * heads * 2);
  const uint32_t word_bytes = WordBytes(args.dtype);
  // In wire order; ids of the tiers as hexadecimal digits.
  for (uint32_t left = 0x4325160, section = kFirstCodes; section < kSections; left >>= 4, ++section) {
    const uint32_t id = left & 15;
    const uint64_t cell = CellCodeBytes(static_cast<Tier>(id), args.head_dim, word_bytes);
    at = Place(sections, section, at, TallyAt(total, id) * heads * cell);
  }
  sections->chunk_bytes = at;
}

// What each thread brings to the prefix sum: its slice of tiers, and what Classify found in its slice of tokens.
struct SliceSums {
  TierTally tally;
  unsigned long long nonfinite, escaped;
};

SPECTRUMKV_DEVICE SliceSums Add(const SliceSums& a, const SliceSums& b) {
  return SliceSums{{a.tally.low + b.tally.low, a.tally.high + b.tally.high}, a.nonfinite + b.nonfinite,
                   a.escaped + b.escaped};
}

// Sum over the threads up to and including this one; *total over all. Called by the whole block.
SPECTRUMKV_DEVICE SliceSums PrefixSum(SliceSums mine, SliceSums* shared, SliceSums* total) {
  const uint32_t thread = threadIdx.x;
  shared[thread] = mine;
  __syncthreads();
  for (uint32_t step = 1; step < kLayoutThreads; step *= 2) {
    const bool reaches = thread >= step;
    const SliceSums before = reaches ? shared[thread - step] : SliceSums{};
    __syncthreads();
    if (reaches) {
      mine = Add(mine, before);
      shared[thread] = mine;
    }
    __syncthreads();
  }
  *total = shared[kLayoutThreads - 1];
  return mine;
}

// Zeros after each section, and the tier map.
SPECTRUMKV_DEVICE void WriteFrame(const ChunkArgs& args, const Sections& sections, const uint8_t* tiers) {
  for (uint32_t t = threadIdx.x; t < args.tokens; t += kLayoutThreads) args.chunk[sections.begin[0] + t] = tiers[t];
  const uint32_t section = threadIdx.x / 16;
  if (section >= kSections) return;
  const uint64_t at = sections.end[section] + threadIdx.x % 16;
  if (at < (sections.end[section] + 15) / 16 * 16) args.chunk[at] = 0;
}

// Entry e is token e of K, or token e - tokens of V. kWrites: encoding, the chunk is written; else it is read.
template <bool kWrites>
SPECTRUMKV_KERNEL(kLayoutThreads)
Layout(const BatchArgs batch) {
  __shared__ SliceSums sums[kLayoutThreads];
  __shared__ Sections sections;
  const ChunkArgs& args = ChunkOf(batch);
  const uint8_t* tiers = kWrites ? args.work.tiers : args.chunk + kHeaderBytes;
  const uint32_t entries = args.tokens * args.planes;
  const uint32_t slice = (entries + kLayoutThreads - 1) / kLayoutThreads;
  const uint32_t first = slice * threadIdx.x;
  const uint32_t end = first + slice < entries ? first + slice : entries;

  SliceSums mine{};
  for (uint32_t e = first; e < end; ++e) {
    const bool value = e >= args.tokens;
    const uint32_t token = value ? e - args.tokens : e;
    const uint32_t tier = tiers[token] >> (value ? 4 : 0) & 15;
    Count(&mine.tally, tier);
    if (!value && IsRotated(static_cast<Tier>(tier))) Count(&mine.tally, kRotatedKeys);
    if (value) continue;
    if (!kWrites) {
      args.work.tiers[token] = static_cast<uint8_t>(tiers[token]);
      continue;
    }
    mine.nonfinite += args.work.nonfinite[token];
    mine.escaped += args.work.escaped[token];
  }
  SliceSums total;
  const SliceSums through = PrefixSum(mine, sums, &total);
  if (threadIdx.x == 0) PlaceSections(args, total.tally, &sections);
  __syncthreads();

  const bool fits = !kWrites || (sections.chunk_bytes <= args.capacity &&
                                 sections.chunk_bytes - kHeaderBytes <= 0xFFFFFFFF);
  if (threadIdx.x == 0) {
    *args.work.chunk = ChunkPlaces{sections.begin[1], sections.begin[2],
                                   TallyAt(total.tally, kRotatedKeys) != 0 ? 1u : 0u, fits ? 1u : 0u};
    *args.report = fits && kWrites ? ChunkReport{sections.chunk_bytes, total.nonfinite, 0,
                                                 static_cast<uint32_t>(total.escaped), 0}
                                   : ChunkReport{};
  }
  if (!fits) return;
  if (kWrites) WriteFrame(args, sections, tiers);

  TierTally before{through.tally.low - mine.tally.low, through.tally.high - mine.tally.high};
  const uint32_t word_bytes = WordBytes(args.dtype);
  for (uint32_t e = first; e < end; ++e) {
    const bool value = e >= args.tokens;
    const uint32_t id = tiers[value ? e - args.tokens : e] >> (value ? 4 : 0) & 15;
    const Tier tier = static_cast<Tier>(id);
    const uint64_t cells = static_cast<uint64_t>(TallyAt(before, id)) * args.heads;
    const uint64_t heads = args.heads;
    CellPlace place;
    place.codes = sections.begin[CodesOf(tier)] + cells * CellCodeBytes(tier, args.head_dim, word_bytes);
    place.scales = HasScale8(tier) ? sections.begin[3] + Scales8Of(before) * heads
                                   : sections.begin[4] + Scales16Of(before) * heads * 2;
    args.work.cells[e] = place;
    Count(&before, id);
  }
}

}  // namespace spectrumkv::gpu
