// Planes of random values in every memory layout the codec contract allows, with guard bytes around and between.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/codec/backend.h"

namespace spectrumkv::testing {

enum class Layout {
  kTokenMajor,  // [token][head][dim], dense: NHD
  kHeadMajor,   // [head][token][dim]: HND
  kPadded,      // NHD with unused bytes after every head and token
  kDimMajor,    // [head][dim][token]: strided dims
};
constexpr Layout kLayouts[] = {Layout::kTokenMajor, Layout::kHeadMajor, Layout::kPadded, Layout::kDimMajor};

// [tokens, heads, head_dim] of one dtype in memory of its own, all bytes `fill` at first.
class Plane {
 public:
  // misalignment: bytes by which the first value misses a 64-byte boundary.
  Plane(const ChunkDims& dims, DType dtype, Layout layout, size_t misalignment, uint8_t fill);

  SourcePlane source() const { return SourcePlane{const_rows_.data(), head_stride_, dim_stride_}; }
  TargetPlane target() { return TargetPlane{rows_.data(), head_stride_, dim_stride_}; }
  uint8_t* At(uint32_t token, uint32_t head, uint32_t dim);
  const std::vector<uint8_t>& memory() const { return memory_; }

  // Values only, [token][head][dim].
  std::vector<uint8_t> Values();
  // Every byte that belongs to no value is still `fill`.
  bool GuardsIntact();

  uint32_t GetWord(uint32_t token, uint32_t head, uint32_t dim);
  void SetWord(uint32_t token, uint32_t head, uint32_t dim, uint32_t word);

 private:
  ChunkDims dims_;
  DType dtype_;
  uint8_t fill_;
  std::vector<uint8_t> memory_;
  std::vector<uint8_t*> rows_;
  std::vector<const uint8_t*> const_rows_;
  int64_t head_stride_ = 0, dim_stride_ = 0;
};

// Finite values of mixed magnitude, some tokens with one odd value each: NaN, infinities, -0, subnormals, 1024, 65504
// and their neighbours, zero tokens, constant tokens.
void FillRandom(Plane* plane, const ChunkDims& dims, std::mt19937_64* rng);
// Normal values of standard deviation `sigma`.
void FillNormal(Plane* plane, const ChunkDims& dims, float sigma, std::mt19937_64* rng);

// Every tier map byte as likely as any other; V nibbles 0 without V. One map in four has one tier only.
std::vector<uint8_t> RandomTiers(const ChunkDims& dims, std::mt19937_64* rng);

// Other codes and scales in a valid chunk: what a foreign encoder may send.
void ScrambleChunk(std::vector<uint8_t>* chunk, std::mt19937_64* rng);

// The word of dtype nearest to x.
uint32_t WordOf(float x, DType dtype);
float ValueOf(uint32_t word, DType dtype);

// SPECTRUMKV_TEST_SEED or a fixed one; printed, so that a failure can be run again.
uint64_t Seed();

// The backends this machine runs, apart from scalar; prints `SKIPPED:` for each it cannot run.
std::vector<const Backend*> OtherBackends();

}  // namespace spectrumkv::testing
