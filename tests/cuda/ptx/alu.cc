#include "tests/cuda/ptx/alu.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/codec/codec_math.h"

namespace spectrumkv::ptx {
namespace {

float AsFloat(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
uint64_t FloatResult(float x) { return std::isnan(x) ? 0x7FFFFFFF : std::bit_cast<uint32_t>(x); }
int64_t Signed(uint64_t value) { return static_cast<int64_t>(value); }

[[noreturn]] void Refuse(const Instruction& i) { throw Fault("unsupported: " + i.text); }

bool CompareFloats(Compare compare, float x, float y) {
  const bool unordered = std::isnan(x) || std::isnan(y);
  switch (compare) {
    case Compare::kNum: return !unordered;
    case Compare::kNan: return unordered;
    case Compare::kEq: return x == y;
    case Compare::kNe: return !unordered && x != y;
    case Compare::kLt: return x < y;
    case Compare::kLe: return x <= y;
    case Compare::kGt: return x > y;
    case Compare::kGe: return x >= y;
    case Compare::kEqu: return unordered || x == y;
    case Compare::kNeu: return unordered || x != y;
    case Compare::kLtu: return unordered || x < y;
    case Compare::kLeu: return unordered || x <= y;
    case Compare::kGtu: return unordered || x > y;
    case Compare::kGeu: return unordered || x >= y;
    default: throw Fault("no comparison");
  }
}

bool CompareIntegers(Compare compare, Type type, uint64_t x, uint64_t y) {
  const bool less = type.kind == Kind::kSigned ? Signed(x) < Signed(y) : x < y;
  switch (compare) {
    case Compare::kEq: return x == y;
    case Compare::kNe: return x != y;
    case Compare::kLt: return less;
    case Compare::kLe: return less || x == y;
    case Compare::kGt: return !less && x != y;
    case Compare::kGe: return !less;
    default: throw Fault("no comparison of integers");
  }
}

uint64_t SetPredicate(const Instruction& i, const uint64_t* in) {
  if (i.type.kind == Kind::kPredicate) Refuse(i);
  const bool holds = i.type.kind == Kind::kFloat
                         ? CompareFloats(i.compare, AsFloat(in[0]), AsFloat(in[1]))
                         : CompareIntegers(i.compare, i.type, Fit(in[0], i.type), Fit(in[1], i.type));
  const uint64_t other = i.combine == Combine::kNone ? 0 : in[2] & 1;
  switch (i.combine) {
    case Combine::kNone: return holds;
    case Combine::kAnd: return holds & other;
    case Combine::kOr: return holds | other;
    case Combine::kXor: return holds ^ other;
  }
  return 0;
}

double RoundToInteger(double x, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearest: return std::nearbyint(x);
    case Rounding::kZero: return std::trunc(x);
    case Rounding::kDown: return std::floor(x);
    case Rounding::kUp: return std::ceil(x);
    case Rounding::kNone: break;
  }
  throw Fault("a conversion to an integer that does not say how it rounds");
}

uint64_t FloatToInteger(const Instruction& i, float x) {
  if (std::isnan(x)) return 0;
  const bool is_signed = i.type.kind == Kind::kSigned;
  const double rounded = RoundToInteger(x, i.rounding), top = std::ldexp(1.0, i.type.bits - (is_signed ? 1 : 0));
  if (rounded >= top) return is_signed ? (uint64_t{1} << (i.type.bits - 1)) - 1 : Fit(~uint64_t{0}, i.type);
  if (rounded < (is_signed ? -top : 0.0)) return is_signed ? Fit(uint64_t{1} << (i.type.bits - 1), i.type) : 0;
  return is_signed ? static_cast<uint64_t>(static_cast<int64_t>(rounded)) : static_cast<uint64_t>(rounded);
}

uint64_t FromFloat(const Instruction& i, float x) {
  const bool nearest = i.rounding == Rounding::kNearest;
  if (i.type.kind == Kind::kFloat && i.type.bits == 32) {
    return FloatResult(i.rounding == Rounding::kNone ? x : static_cast<float>(RoundToInteger(x, i.rounding)));
  }
  if (i.type.kind == Kind::kFloat && i.type.bits == 16 && nearest) return std::isnan(x) ? 0x7FFF : FloatToHalf(x);
  if (i.type.kind == Kind::kBfloat && nearest) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
  if (i.type.kind == Kind::kFloat || i.type.kind == Kind::kBfloat) Refuse(i);
  return FloatToInteger(i, x);
}

uint64_t Convert(const Instruction& i, uint64_t value) {
  const Type from = i.from, to = i.type;
  if (from.kind == Kind::kFloat || from.kind == Kind::kBfloat) {
    if (from.bits == 64 || i.saturate) Refuse(i);
    if (from.kind == Kind::kBfloat) return FromFloat(i, AsFloat(value << 16));
    return FromFloat(i, from.bits == 32 ? AsFloat(value) : HalfToFloat(static_cast<uint32_t>(value) & 0xFFFF));
  }
  const uint64_t fitted = Fit(value, from);
  if (to.kind == Kind::kFloat) {
    if (to.bits != 32 || i.rounding != Rounding::kNearest) Refuse(i);
    return FloatResult(from.kind == Kind::kSigned ? static_cast<float>(Signed(fitted)) : static_cast<float>(fitted));
  }
  if (i.saturate || to.kind == Kind::kBfloat) Refuse(i);
  return Fit(fitted, to);
}

uint64_t FloatArithmetic(const Instruction& i, const uint64_t* in) {
  const float a = AsFloat(in[0]), b = i.ins.size() > 1 ? AsFloat(in[1]) : 0.0f;
  switch (i.op) {
    case Opcode::kAdd: return FloatResult(a + b);
    case Opcode::kSub: return FloatResult(a - b);
    case Opcode::kMul: return FloatResult(a * b);
    case Opcode::kDiv: return FloatResult(a / b);
    case Opcode::kFma: return FloatResult(std::fma(a, b, AsFloat(in[2])));
    case Opcode::kSqrt: return FloatResult(std::sqrt(a));
    case Opcode::kRcp: return FloatResult(1.0f / a);
    case Opcode::kNeg: return (in[0] ^ 0x80000000) & 0xFFFFFFFF;
    case Opcode::kAbs: return in[0] & 0x7FFFFFFF;
    case Opcode::kMin:
    case Opcode::kMax: {
      if (std::isnan(a) || std::isnan(b)) return FloatResult(std::isnan(a) ? b : a);
      const bool max = i.op == Opcode::kMax;
      if (a == b) return FloatResult(std::signbit(a) == max ? b : a);
      return FloatResult((a > b) == max ? a : b);
    }
    default: Refuse(i);
  }
}

uint64_t MultiplyIntegers(const Instruction& i, const uint64_t* in) {
  const uint64_t a = Fit(in[0], i.type), b = Fit(in[1], i.type);
  Type result = i.type;
  uint64_t product = 0;
  switch (i.part) {
    case Part::kLow: product = a * b; break;
    case Part::kWide:
      product = a * b;
      result.bits *= 2;
      break;
    case Part::kHigh:
      product = i.type.kind == Kind::kSigned
                    ? static_cast<uint64_t>((static_cast<__int128>(Signed(a)) * Signed(b)) >> i.type.bits)
                    : static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> i.type.bits);
      break;
    case Part::kNone: Refuse(i);
  }
  return Fit(i.op == Opcode::kMad ? product + in[2] : product, result);
}

uint64_t Divide(const Instruction& i, const uint64_t* in) {
  const uint64_t a = Fit(in[0], i.type), b = Fit(in[1], i.type);
  if (b == 0) throw Fault("division by zero: " + i.text);
  const bool rest = i.op == Opcode::kRem;
  if (i.type.kind == Kind::kSigned) {
    return Fit(static_cast<uint64_t>(rest ? Signed(a) % Signed(b) : Signed(a) / Signed(b)), i.type);
  }
  return rest ? a % b : a / b;
}

uint64_t Shift(const Instruction& i, const uint64_t* in) {
  const uint64_t bits = static_cast<uint64_t>(i.type.bits), count = std::min<uint64_t>(in[1] & 0xFFFFFFFF, bits);
  const uint64_t value = Fit(in[0], i.type);
  if (i.op == Opcode::kShl) return count == bits ? 0 : Fit(value << count, i.type);
  if (i.type.kind == Kind::kSigned) return static_cast<uint64_t>(Signed(value) >> std::min<uint64_t>(count, 63));
  return count == bits ? 0 : value >> count;
}

uint64_t Permute(const uint64_t* in) {
  const uint64_t bytes = (in[0] & 0xFFFFFFFF) | in[1] << 32;
  uint64_t result = 0;
  for (int n = 0; n < 4; ++n) {
    const uint64_t selector = in[2] >> (4 * n) & 15;
    uint64_t byte = bytes >> (8 * (selector & 7)) & 0xFF;
    if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
    result |= byte << (8 * n);
  }
  return result;
}

uint64_t BitField(const Instruction& i, const uint64_t* in) {
  const bool insert = i.op == Opcode::kBfi;
  const uint64_t bits = static_cast<uint64_t>(i.type.bits);
  const uint64_t position = (insert ? in[2] : in[1]) & 0xFF, length = (insert ? in[3] : in[2]) & 0xFF;
  if (insert) {
    const uint64_t base = Fit(in[1], i.type);
    if (position >= bits || length == 0) return base;
    const uint64_t mask = (length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1) << position;
    return Fit((base & ~mask) | (in[0] << position & mask), i.type);
  }
  if (i.type.kind == Kind::kSigned || i.type.bits != 32) Refuse(i);
  if (length == 0 || position >= bits) return 0;
  const uint64_t field = (in[0] & 0xFFFFFFFF) >> position;
  return length >= 32 ? field : field & ((uint64_t{1} << length) - 1);
}

uint64_t ThreeInputLogic(const uint64_t* in) {
  uint64_t result = 0;
  for (int n = 0; n < 32; ++n) {
    const uint64_t index = (in[0] >> n & 1) * 4 + (in[1] >> n & 1) * 2 + (in[2] >> n & 1);
    result |= (in[3] >> index & 1) << n;
  }
  return result;
}

uint64_t FunnelShift(const Instruction& i, const uint64_t* in) {
  const uint64_t pair = (in[0] & 0xFFFFFFFF) | in[1] << 32, asked = in[2] & 0xFFFFFFFF;
  const bool wrap = i.shift == ShiftMode::kLeftWrap || i.shift == ShiftMode::kRightWrap;
  const uint64_t count = wrap ? asked & 31 : std::min<uint64_t>(asked, 32);
  const bool left = i.shift == ShiftMode::kLeftWrap || i.shift == ShiftMode::kLeftClamp;
  return (left ? pair << count >> 32 : pair >> count) & 0xFFFFFFFF;
}

uint64_t ReverseBits(uint64_t value, int bits) {
  uint64_t result = 0;
  for (int n = 0; n < bits; ++n) result |= (value >> n & 1) << (bits - 1 - n);
  return result;
}

uint64_t IntegerArithmetic(const Instruction& i, const uint64_t* in) {
  const Type type = i.type;
  const uint64_t a = Fit(in[0], type), b = i.ins.size() > 1 ? Fit(in[1], type) : 0;
  const bool greater = type.kind == Kind::kSigned ? Signed(a) > Signed(b) : a > b;
  switch (i.op) {
    case Opcode::kAdd: return Fit(a + b, type);
    case Opcode::kSub: return Fit(a - b, type);
    case Opcode::kMul:
    case Opcode::kMad: return MultiplyIntegers(i, in);
    case Opcode::kDiv:
    case Opcode::kRem: return Divide(i, in);
    case Opcode::kMin: return greater ? b : a;
    case Opcode::kMax: return greater ? a : b;
    case Opcode::kNeg: return Fit(0 - a, type);
    case Opcode::kAbs: return Fit(Signed(a) < 0 ? 0 - a : a, type);
    case Opcode::kAnd: return a & b;
    case Opcode::kOr: return a | b;
    case Opcode::kXor: return a ^ b;
    case Opcode::kNot: return Fit(~a, type);
    case Opcode::kPopc: return static_cast<uint64_t>(std::popcount(a));
    case Opcode::kClz: return static_cast<uint64_t>(std::countl_zero(a) - (64 - type.bits));
    case Opcode::kBrev: return ReverseBits(a, type.bits);
    default: Refuse(i);
  }
}

}  // namespace

uint64_t Fit(uint64_t value, Type type) {
  if (type.bits >= 64) return value;
  const uint64_t mask = (uint64_t{1} << type.bits) - 1;
  value &= mask;
  return type.kind == Kind::kSigned && (value >> (type.bits - 1)) != 0 ? value | ~mask : value;
}

uint64_t Evaluate(const Instruction& i, const uint64_t* in) {
  switch (i.op) {
    case Opcode::kMov: return Fit(in[0], Type{Kind::kBits, i.type.bits});
    case Opcode::kSetp: return SetPredicate(i, in);
    case Opcode::kSelp: return (in[2] & 1) != 0 ? Fit(in[0], i.type) : Fit(in[1], i.type);
    case Opcode::kCvt: return Convert(i, in[0]);
    case Opcode::kShl:
    case Opcode::kShr: return Shift(i, in);
    case Opcode::kPrmt: return Permute(in);
    case Opcode::kBfe:
    case Opcode::kBfi: return BitField(i, in);
    case Opcode::kLop3: return ThreeInputLogic(in);
    case Opcode::kShf: return FunnelShift(i, in);
    default: return i.type.kind == Kind::kFloat ? FloatArithmetic(i, in) : IntegerArithmetic(i, in);
  }
}

}  // namespace spectrumkv::ptx
