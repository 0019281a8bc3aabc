#include "server/pool/overlap.h"

#include <algorithm>
#include <numeric>

#include "server/pool/lattice_meet.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kMaxSpan = uint64_t{1} << 62;
// Pieces that are looked at on all levels of the search of one schema: the most tensors a schema may have (2 * 4096), as
// often as the most groups have dims (64 * 4).
constexpr uint64_t kVisits = uint64_t{1} << 21;
// Of all exact comparisons of one schema: a fraction of a second.
constexpr uint64_t kExactSteps = uint64_t{1} << 23;
using Pair = std::pair<size_t, size_t>;

// A tensor on one level of the search: what is left of its dims, greatest stride first.
struct Piece {
  size_t index = 0;  // in the caller's vector
  uint64_t begin = 0;
  uint64_t span = 0;
  uint64_t element_bytes = 0;
  std::array<Lattice::Dim, 4> dims{};
  size_t dim_count = 0;
  uint64_t end() const { return begin + span; }
};

// Of equal strides the later dim, usually the inner one, comes first.
std::array<size_t, 4> OrderByStride(const Lattice& lattice) {
  std::array<size_t, 4> order{3, 2, 1, 0};
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lattice.dims[a].stride < lattice.dims[b].stride; });
  return order;
}

Piece PieceOf(const Lattice& lattice, size_t index) {
  Piece piece{index, lattice.offset, *SpanOf(lattice), lattice.element_bytes};
  const std::array<size_t, 4> order = OrderByStride(lattice);
  for (size_t i = order.size(); i-- > 0;) {
    const Lattice::Dim dim = lattice.dims[order[i]];
    if (dim.extent > 1) piece.dims[piece.dim_count++] = dim;
  }
  return piece;
}

void SortByBegin(std::vector<Piece>* pieces) {
  std::sort(pieces->begin(), pieces->end(), [](const Piece& a, const Piece& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.index < b.index;
  });
}

// Pieces whose hulls touch in a chain. `modulus` 0: positions are on a line; else they are on a circle of that length.
struct Chain {
  std::vector<Piece> pieces;
  uint64_t modulus = 0;
};

// `pieces` sorted, positions on a line: splits them where nothing crosses. What is alone is apart from all.
void SplitLine(const std::vector<Piece>& pieces, std::vector<Chain>* chains) {
  size_t first = 0;
  while (first < pieces.size()) {
    size_t last = first + 1;
    uint64_t end = pieces[first].end();
    for (; last < pieces.size() && pieces[last].begin < end; ++last) end = std::max(end, pieces[last].end());
    if (last - first > 1) {
      const auto begin = pieces.begin();
      chains->push_back({{begin + static_cast<ptrdiff_t>(first), begin + static_cast<ptrdiff_t>(last)}, 0});
    }
    first = last;
  }
}

// Turns a circle of length `circle` into a line, cut where no piece crosses. False where there is no such place.
bool Unroll(std::vector<Piece>* pieces, uint64_t circle) {
  SortByBegin(pieces);
  const size_t n = pieces->size();
  // What the pieces of the lap before reach into this one, then on from there.
  uint64_t reach = 0;
  for (const Piece& piece : *pieces) reach = std::max(reach, piece.end());
  reach = reach > circle ? reach - circle : 0;
  for (size_t i = 0; i < n; ++i) {
    if ((*pieces)[i].begin >= reach) {
      for (size_t j = 0; j < i; ++j) (*pieces)[j].begin += circle;
      std::rotate(pieces->begin(), pieces->begin() + static_cast<ptrdiff_t>(i), pieces->end());
      return true;
    }
    reach = std::max(reach, (*pieces)[i].end());
  }
  return false;
}

// Looks at the chain modulo its greatest stride: what still touches there goes to `chains`. False where that decides
// nothing.
bool TakeStrideOff(Chain chain, std::vector<Chain>* chains) {
  uint64_t stride = 0;
  for (const Piece& piece : chain.pieces) {
    if (piece.dim_count > 0) stride = std::max(stride, piece.dims[0].stride);
  }
  if (stride == 0) return false;
  if (chain.modulus != 0 && chain.modulus % stride != 0) return false;
  for (Piece& piece : chain.pieces) {
    if (piece.dim_count > 0 && piece.dims[0].stride == stride) {
      piece.span -= (piece.dims[0].extent - 1) * stride;
      std::copy(piece.dims.begin() + 1, piece.dims.end(), piece.dims.begin());
      --piece.dim_count;
    }
    if (piece.span > stride) return false;
    piece.begin %= stride;
  }
  if (Unroll(&chain.pieces, stride)) {
    SplitLine(chain.pieces, chains);
  } else {
    chains->push_back({std::move(chain.pieces), stride});
  }
  return true;
}

// Whether taking strides off shows `pieces` (sorted) to be disjoint; false says nothing. A list of what is left to do
// and no recursion: a schema may have as many levels as strides, and no more pieces are left than it began with.
bool ShownApart(const std::vector<Piece>& pieces, uint64_t* visits_left) {
  std::vector<Chain> chains;
  SplitLine(pieces, &chains);
  while (!chains.empty()) {
    Chain chain = std::move(chains.back());
    chains.pop_back();
    if (chain.pieces.size() > *visits_left) return false;
    *visits_left -= chain.pieces.size();
    if (!TakeStrideOff(std::move(chain), &chains)) return false;
  }
  return true;
}

// The exact answer, for each pair whose hulls touch. `pieces` sorted.
std::optional<Pair> SearchPairs(const std::vector<Lattice>& lattices, const std::vector<Piece>& pieces,
                                uint64_t* steps_left) {
  std::vector<MeetShape> shapes;
  shapes.reserve(pieces.size());
  for (const Piece& piece : pieces) shapes.push_back(MeetShapeOf(lattices[piece.index]));
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (size_t j = i + 1; j < pieces.size() && pieces[j].begin < pieces[i].end(); ++j) {
      if (Meet(shapes[i], shapes[j], steps_left) != Meeting::kApart) return Pair(pieces[i].index, pieces[j].index);
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<uint64_t> SpanOf(const Lattice& lattice) {
  unsigned __int128 span = lattice.element_bytes;
  for (const Lattice::Dim& dim : lattice.dims) {
    if (dim.extent > 1) span += static_cast<unsigned __int128>(dim.extent - 1) * dim.stride;
    if (span > kMaxSpan) return std::nullopt;
  }
  return static_cast<uint64_t>(span);
}

int FindSelfOverlap(const Lattice& lattice) {
  uint64_t span = lattice.element_bytes;
  for (const size_t i : OrderByStride(lattice)) {
    const Lattice::Dim& dim = lattice.dims[i];
    if (dim.extent <= 1) continue;
    if (dim.stride < span) return static_cast<int>(i);
    span += (dim.extent - 1) * dim.stride;
  }
  return -1;
}

std::optional<Pair> FindOverlap(const std::vector<Lattice>& lattices) {
  std::vector<size_t> order(lattices.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return lattices[a].segment < lattices[b].segment; });
  // Of all segments together: a schema may have thousands.
  uint64_t visits_left = kVisits, steps_left = kExactSteps;
  size_t first = 0;
  while (first < order.size()) {
    std::vector<Piece> pieces;
    const uint32_t segment = lattices[order[first]].segment;
    for (; first < order.size() && lattices[order[first]].segment == segment; ++first) {
      pieces.push_back(PieceOf(lattices[order[first]], order[first]));
    }
    SortByBegin(&pieces);
    // Most schemas end here.
    if (ShownApart(pieces, &visits_left)) continue;
    if (auto found = SearchPairs(lattices, pieces, &steps_left)) return found;
  }
  return std::nullopt;
}

}  // namespace spectrumkv
