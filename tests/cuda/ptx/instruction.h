// PTX as the interpreter holds it: decoded once, so that nothing is compared as text while it runs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace spectrumkv::ptx {

enum class Kind : uint8_t { kBits, kUnsigned, kSigned, kFloat, kBfloat, kPredicate };

struct Type {
  Kind kind = Kind::kBits;
  int bits = 0;
};

enum class Opcode : uint8_t {
  kMov,
  kLd,
  kSt,
  kCvta,
  kAdd,
  kSub,
  kMul,
  kMad,
  kFma,
  kDiv,
  kRem,
  kMin,
  kMax,
  kNeg,
  kAbs,
  kSqrt,
  kRcp,
  kAnd,
  kOr,
  kXor,
  kNot,
  kShl,
  kShr,
  kSetp,
  kSelp,
  kCvt,
  kPrmt,
  kBfe,
  kBfi,
  kPopc,
  kClz,
  kBrev,
  kLop3,
  kShf,
  kBra,
  kRet,
  kBar,
  kBarWarp,
  kShfl,
  kVote,
  kAtom,
  kRefused
};

enum class Space : uint8_t { kGeneric, kGlobal, kParam, kShared, kLocal };
enum class Compare : uint8_t { kNone, kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
enum class Combine : uint8_t { kNone, kAnd, kOr, kXor };
enum class Rounding : uint8_t { kNone, kNearest, kZero, kDown, kUp };  // rn and rni, rz and rzi, ...
enum class Part : uint8_t { kNone, kLow, kHigh, kWide };
enum class Action : uint8_t { kNone, kAdd, kMin, kMax, kAnd, kOr, kExch, kBallot, kAny, kAll, kUp, kDown, kXor, kIdx };
enum class ShiftMode : uint8_t { kNone, kLeftClamp, kLeftWrap, kRightClamp, kRightWrap };

// Of the x dimension where nothing else is said; other threads' dimensions, and z, are refused.
enum class Special : uint8_t { kTid, kNtid, kCtaid, kCtaidY, kNctaid, kNctaidY, kLane };

struct Operand {
  enum Form : uint8_t { kRegister, kImmediate, kSpecial, kAddress };
  Form form = kImmediate;
  int reg = -1;          // kRegister; the base of kAddress, or -1
  bool negated = false;  // a predicate
  Special special = Special::kTid;
  uint64_t value = 0;  // kImmediate; the offset of kAddress
};

struct Instruction {
  std::string text;  // as written; of kRefused: why
  Opcode op = Opcode::kRefused;
  Type type, from;  // from: of cvt; else as type
  Space space = Space::kGeneric;
  Compare compare = Compare::kNone;
  Combine combine = Combine::kNone;
  Rounding rounding = Rounding::kNone;
  Part part = Part::kNone;
  Action action = Action::kNone;
  ShiftMode shift = ShiftMode::kNone;
  bool saturate = false;
  bool returns = true;  // atom; red does not
  int guard = -1;       // the register that must be true (or false) for it to be done
  bool guard_negated = false;
  int target = -1;         // of bra
  int predicate_out = -1;  // the second destination of shfl
  std::vector<Operand> outs, ins;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  int param_bytes = 0, registers = 0, shared_bytes = 0, local_bytes = 0;
};

// What a device would do otherwise, or what this interpreter does not know.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace spectrumkv::ptx
