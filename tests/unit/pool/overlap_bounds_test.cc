// What a schema can make the search for overlaps cost: neither stack nor time grows with what a worker sends.
#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/pool/overlap.h"
#include "server/pool/schema.h"
#include "tests/unit/pool/pool_fixture.h"

namespace spectrumkv {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr std::chrono::seconds kMost(60);  // sanitizers; unbounded it is hours
constexpr uint64_t kElement = 16;

void OnASmallStack(std::function<void()> work) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, kStackBytes), 0);
  pthread_t thread;
  const auto run = [](void* argument) -> void* {
    (*static_cast<std::function<void()>*>(argument))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &work), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  pthread_attr_destroy(&attributes);
}

using Found = std::optional<std::pair<size_t, size_t>>;

Found FindWithinBounds(const std::vector<Lattice>& lattices) {
  Found found;
  const auto begin = std::chrono::steady_clock::now();
  OnASmallStack([&] { found = FindOverlap(lattices); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kMost);
  return found;
}

// `count` tensors; the strides of the first dim are all different, so each is a level of its own. `dims` of them are
// used, nested.
std::vector<Lattice> Comb(size_t count, size_t dims, const std::function<uint64_t(size_t)>& offset, uint64_t least_stride) {
  std::vector<Lattice> lattices;
  for (size_t i = 0; i < count; ++i) {
    Lattice lattice{0, offset(i), kElement, {}};
    uint64_t stride = least_stride + i * kElement;
    for (size_t d = dims; d-- > 0; stride = stride * 4 + kElement) lattice.dims[d] = {stride, 2};
    lattices.push_back(lattice);
  }
  return lattices;
}

TEST(OverlapBounds, AsManyLevelsAsTensorsThatAllMeet) {
  for (const size_t count : {size_t{4096}, size_t{8192}}) {
    for (const size_t dims : {size_t{1}, size_t{3}, size_t{4}}) {
      SCOPED_TRACE(std::to_string(count) + " tensors, dims " + std::to_string(dims));
      const auto all_at_zero = Comb(count, dims, [](size_t) { return 0; }, 2 * kElement);
      ASSERT_TRUE(FindWithinBounds(all_at_zero).has_value());
    }
  }
}

TEST(OverlapBounds, AsManyLevelsAsTensorsThatAreApart) {
  // Each has its own place in the first page and in one far behind: hulls all touch.
  const auto apart = [](size_t count) {
    return Comb(count, 1, [](size_t i) { return i * kElement; }, count * kElement);
  };
  for (const size_t count : {size_t{2}, size_t{64}, size_t{1024}, size_t{2048}}) {
    SCOPED_TRACE(count);
    EXPECT_FALSE(FindWithinBounds(apart(count)).has_value()) << "within the bounds the answer is exact";
    auto met = apart(count);
    met[count / 2].offset = met[count / 2 - 1].offset;
    EXPECT_TRUE(FindWithinBounds(met).has_value());
  }
  // Beyond the bounds either answer will do, as long as there is one.
  FindWithinBounds(apart(4096));
  FindWithinBounds(apart(8192));
}

// Two blocks each: the first ones side by side, the second ones `8192 * (i / share + 1)` elements behind. Each stride is
// a level that leaves one chain of all the others, and in the end all are apart.
std::vector<Lattice> Ladder(size_t count, size_t share) {
  std::vector<Lattice> lattices;
  for (size_t i = 0; i < count; ++i) {
    lattices.push_back({0, i * kElement, kElement, {{{8192 * (i / share + 1) * kElement, 2}, {0, 1}, {0, 1}, {0, 1}}}});
  }
  return lattices;
}

TEST(OverlapBounds, AsManyStridesAsTheGroupsOfASchemaHaveDimsAreDecided) {
  std::vector<Lattice> lattices = Ladder(8192, 32);  // too many pairs to be decided one by one
  EXPECT_FALSE(FindWithinBounds(lattices).has_value());
  lattices[5000].offset += kElement;
  EXPECT_TRUE(FindWithinBounds(lattices).has_value());
}

TEST(OverlapBounds, AsManyLevelsAsTensorsThatComeApart) {
  EXPECT_FALSE(FindWithinBounds(Ladder(1024, 1)).has_value());
  FindWithinBounds(Ladder(4096, 1));
  FindWithinBounds(Ladder(8192, 1));
}

TEST(OverlapBounds, TheExactStepsAreOfAllSegmentsTogether) {
  // Every pair takes a good part of the bound and is apart; a segment each.
  std::vector<Lattice> lattices;
  for (uint32_t segment = 0; segment < 512; ++segment) {
    const auto combed = [&](uint64_t offset, uint64_t stride) {
      return Lattice{segment, offset, 1, {{{4 * stride, 1 << 10}, {4, 1 << 20}, {0, 1}, {0, 1}}}};
    };
    lattices.push_back(combed(0, (1 << 21) - 1));
    lattices.push_back(combed(1, (1 << 21) - 3));
  }
  EXPECT_FALSE(FindWithinBounds({lattices[0], lattices[1]}).has_value());
  EXPECT_TRUE(FindWithinBounds(lattices).has_value()) << "what is not decided counts as overlapping";
}

TEST(OverlapBounds, TheLargestSchemaOfOneSegmentIsRefusedAndNoMore) {
  PoolSchema schema = MakeSchema("lpbthd", Geometry{1, 1, 8, 1, 2});
  schema.segments[0].size_bytes = uint64_t{1} << 45;
  const LayerSchema first = schema.groups[0].layers[0];
  schema.groups.resize(2, schema.groups[0]);
  uint32_t layer = 0;
  uint64_t stride = kElement;
  for (GroupSchema& group : schema.groups) {
    group.layers.clear();
    for (int i = 0; i < 2048; ++i) {
      LayerSchema next = first;
      next.layer = layer++;
      next.k.offset_bytes = next.v->offset_bytes = 0;
      next.k.block_stride_bytes = stride += kElement;
      next.v->block_stride_bytes = stride += kElement;
      group.layers.push_back(next);
    }
  }
  absl::Status status;
  OnASmallStack([&] { status = CheckSchema(schema, 0); });
  EXPECT_EQ(ReasonOf(status), "OVERLAP") << status;
}

}  // namespace
}  // namespace spectrumkv
