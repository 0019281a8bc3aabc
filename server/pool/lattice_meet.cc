// One dim after the other is taken off, greatest strides first, until two runs are left whose places are known. What is
// taken off leaves few relative places in which the rests can touch: those are tried.
#include "server/pool/lattice_meet.h"

#include <algorithm>
#include <numeric>

namespace spectrumkv {
namespace {

using Int128 = __int128;

// A whole shape, or what is left of it from dims[level] on, at a place.
struct Rest {
  const MeetShape* shape = nullptr;
  size_t level = 0;
  int64_t at = 0;
  bool is_run() const { return level == shape->dim_count; }
  int64_t span() const { return shape->spans[level]; }
  const MeetShape::Dim& dim() const { return shape->dims[level]; }
  int64_t inner_span() const { return shape->spans[level + 1]; }
  Rest Inner(int64_t place) const { return {shape, level + 1, place}; }
};

Int128 FloorDiv(Int128 a, Int128 b) {  // b > 0
  const Int128 quotient = a / b;
  return a % b < 0 ? quotient - 1 : quotient;
}
Int128 CeilDiv(Int128 a, Int128 b) { return -FloorDiv(-a, b); }

// x with a * x = 1 modulo m. REQUIRES: coprime, m >= 1.
int64_t InverseModulo(int64_t a, int64_t m) {
  Int128 r0 = m, r1 = a % m, x0 = 0, x1 = 1;
  while (r1 != 0) {
    const Int128 quotient = r0 / r1;
    std::swap(r0 -= quotient * r1, r1);
    std::swap(x0 -= quotient * x1, x1);
  }
  return static_cast<int64_t>((x0 % m + m) % m);
}

// Which differences j * b.stride - i * a.stride, 0 <= i < a.extent, 0 <= j < b.extent, exist.
class Differences {
 public:
  Differences(const MeetShape::Dim& a, const MeetShape::Dim& b)
      : a_(a),
        b_(b),
        measure_(std::gcd(a.stride, b.stride)),
        a_steps_(a.stride / measure_),
        b_steps_(b.stride / measure_),
        inverse_(InverseModulo(b_steps_, a_steps_)) {}

  int64_t measure() const { return measure_; }

  // REQUIRES: a multiple of measure().
  bool Has(Int128 difference) const {
    const Int128 steps = difference / measure_;
    // All solutions: j = j0 + k * a_steps_, i = i0 + k * b_steps_.
    const Int128 j0 = ((steps % a_steps_ + a_steps_) % a_steps_) * inverse_ % a_steps_;
    const Int128 i0 = (j0 * b_steps_ - steps) / a_steps_;
    const Int128 first = std::max<Int128>(0, CeilDiv(-i0, b_steps_));
    const Int128 last = std::min(FloorDiv(b_.extent - 1 - j0, a_steps_), FloorDiv(a_.extent - 1 - i0, b_steps_));
    return first <= last;
  }

 private:
  const MeetShape::Dim a_, b_;
  const int64_t measure_, a_steps_, b_steps_, inverse_;
};

class Search {
 public:
  explicit Search(uint64_t* steps_left) : steps_left_(steps_left) {}

  Meeting Run(const Rest& a, const Rest& b) {
    if (*steps_left_ == 0) return Meeting::kUndecided;
    --*steps_left_;
    if (a.at + a.span() <= b.at || b.at + b.span() <= a.at) return Meeting::kApart;
    if (a.is_run() && b.is_run()) return Meeting::kMeets;
    if (FewCopiesReach(a, b)) return TryCopies(a, b);
    if (FewCopiesReach(b, a)) return TryCopies(b, a);
    return TryDifferences(a, b);
  }

 private:
  static constexpr int64_t kFew = 4;

  static bool FewCopiesReach(const Rest& a, const Rest& b) {
    return !a.is_run() && (b.is_run() || b.span() / a.dim().stride < kFew);
  }

  // Each copy of a's rest whose hull touches b.
  Meeting TryCopies(const Rest& a, const Rest& b) {
    const Int128 stride = a.dim().stride, ahead = Int128{b.at} - a.at;
    const Int128 first = std::max<Int128>(0, FloorDiv(ahead - a.inner_span(), stride) + 1);
    const Int128 last = std::min<Int128>(a.dim().extent - 1, FloorDiv(ahead + b.span() - 1, stride));
    // One between two that touch a run lies inside it.
    if (b.is_run() && last - first >= 2) return Meeting::kMeets;
    for (Int128 i = first; i <= last; ++i) {
      const Meeting met = Run(a.Inner(static_cast<int64_t>(a.at + i * stride)), b);
      if (met != Meeting::kApart) return met;
    }
    return Meeting::kApart;
  }

  // Both have many copies: each place of a copy of b's rest, seen from one of a's, where they touch.
  Meeting TryDifferences(const Rest& a, const Rest& b) {
    const Differences differences(a.dim(), b.dim());
    const Int128 measure = differences.measure(), base = Int128{b.at} - a.at;
    const Int128 least = 1 - Int128{b.inner_span()}, most = Int128{a.inner_span()} - 1;
    for (Int128 place = base + CeilDiv(least - base, measure) * measure; place <= most; place += measure) {
      if (*steps_left_ == 0) return Meeting::kUndecided;
      --*steps_left_;
      if (!differences.Has(place - base)) continue;
      const Meeting met = Run(a.Inner(0), b.Inner(static_cast<int64_t>(place)));
      if (met != Meeting::kApart) return met;
    }
    return Meeting::kApart;
  }

  uint64_t* const steps_left_;
};

}  // namespace

MeetShape MeetShapeOf(const Lattice& lattice) {
  MeetShape shape;
  shape.offset = static_cast<int64_t>(lattice.offset);
  shape.run = static_cast<int64_t>(lattice.element_bytes);
  std::array<MeetShape::Dim, 4> dims;  // least stride first
  size_t count = 0;
  for (const Lattice::Dim& dim : lattice.dims) {
    if (dim.extent <= 1) continue;
    size_t place = count++;
    const auto stride = static_cast<int64_t>(dim.stride);
    for (; place > 0 && dims[place - 1].stride > stride; --place) dims[place] = dims[place - 1];
    dims[place] = {stride, static_cast<int64_t>(dim.extent)};
  }
  std::array<MeetShape::Dim, 4> merged;
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    if (kept == 0 && dims[i].stride == shape.run) {
      shape.run *= dims[i].extent;
    } else if (kept > 0 && dims[i].stride == merged[kept - 1].stride * merged[kept - 1].extent) {
      merged[kept - 1].extent *= dims[i].extent;
    } else {
      merged[kept++] = dims[i];
    }
  }
  shape.dim_count = kept;
  shape.spans[kept] = shape.run;
  for (size_t i = 0; i < kept; ++i) {
    const size_t level = kept - 1 - i;
    shape.dims[level] = merged[i];
    shape.spans[level] = shape.spans[level + 1] + (merged[i].extent - 1) * merged[i].stride;
  }
  return shape;
}

Meeting Meet(const MeetShape& a, const MeetShape& b, uint64_t* steps_left) {
  return Search(steps_left).Run({&a, 0, a.offset}, {&b, 0, b.offset});
}

}  // namespace spectrumkv
