// Do strided tensors share bytes?
//
// A tensor is a lattice: offset + sum of i_j * stride_j, 0 <= i_j < extent_j, each point `element_bytes` long.
//
// Inside one tensor: with the strides sorted, each must be at least the span of all smaller ones (nesting). Every layout
// that is a permutation of a dense array, padded or sliced, is nested.
//
// Between tensors: sort their hulls and keep apart what does not touch. Among tensors whose hulls touch, take the
// greatest stride S and look at all positions modulo S: what is disjoint there is disjoint in memory. Repeat on those
// whose hulls still touch. This decides fused and split K/V, per block, token, head or element, all layers in one tensor
// in any order, transposed dims; thousands of tensors at once.
//
// That is bounded in work and needs no deep stack: there may be as many levels as strides. What is not shown to be
// disjoint so, such as groups that interleave with different strides, is decided exactly, two tensors at a time
// (lattice_meet.h). That is bounded too, over all segments of a schema; only what is not decided within the bound counts
// as overlapping though it may not: strides of many large extents without a common measure, or thousands of tensors
// whose hulls all touch, each with a stride of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace spectrumkv {

struct Lattice {
  struct Dim {
    uint64_t stride = 0;
    uint64_t extent = 1;
  };
  uint32_t segment = 0;
  uint64_t offset = 0;
  uint64_t element_bytes = 0;
  // Dims of extent 1 are ignored.
  std::array<Dim, 4> dims{};
};

// Bytes from the first to behind the last; nothing where that is above 2^62.
std::optional<uint64_t> SpanOf(const Lattice& lattice);

// The index of a dim whose stride is below the span of the smaller ones, or -1: nested.
// REQUIRES: SpanOf has a value.
int FindSelfOverlap(const Lattice& lattice);

// Indices of two that share a byte (or may, beyond the bound above); nothing where all are disjoint.
// REQUIRES: each nested, with a span, and offset + span below 2^62.
std::optional<std::pair<size_t, size_t>> FindOverlap(const std::vector<Lattice>& lattices);

}  // namespace spectrumkv
