#include "tests/cuda/ptx/decode_words.h"

#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <vector>

namespace spectrumkv::ptx {
namespace {

const std::map<std::string, Opcode>& Opcodes() {
  static const std::map<std::string, Opcode> opcodes = {
      {"mov", Opcode::kMov},   {"ld", Opcode::kLd},     {"st", Opcode::kSt},       {"cvta", Opcode::kCvta},
      {"add", Opcode::kAdd},   {"sub", Opcode::kSub},   {"mul", Opcode::kMul},     {"mad", Opcode::kMad},
      {"fma", Opcode::kFma},   {"div", Opcode::kDiv},   {"rem", Opcode::kRem},     {"min", Opcode::kMin},
      {"max", Opcode::kMax},   {"neg", Opcode::kNeg},   {"abs", Opcode::kAbs},     {"sqrt", Opcode::kSqrt},
      {"rcp", Opcode::kRcp},   {"and", Opcode::kAnd},   {"or", Opcode::kOr},       {"xor", Opcode::kXor},
      {"not", Opcode::kNot},   {"shl", Opcode::kShl},   {"shr", Opcode::kShr},     {"setp", Opcode::kSetp},
      {"selp", Opcode::kSelp}, {"cvt", Opcode::kCvt},   {"prmt", Opcode::kPrmt},   {"bfe", Opcode::kBfe},
      {"bfi", Opcode::kBfi},   {"popc", Opcode::kPopc}, {"clz", Opcode::kClz},     {"brev", Opcode::kBrev},
      {"lop3", Opcode::kLop3}, {"shf", Opcode::kShf},   {"bra", Opcode::kBra},     {"ret", Opcode::kRet},
      {"exit", Opcode::kRet},  {"bar", Opcode::kBar},   {"barrier", Opcode::kBar}, {"shfl", Opcode::kShfl},
      {"vote", Opcode::kVote}, {"atom", Opcode::kAtom}, {"red", Opcode::kAtom}};
  return opcodes;
}

using Setter = std::function<void(Instruction*)>;

template <typename Field, typename Value>
Setter Set(Field Instruction::*field, Value value) {
  return [field, value](Instruction* i) { i->*field = value; };
}

Setter Nothing() {
  return [](Instruction*) {};
}

const std::map<std::string, Setter>& CompareWords() {
  static const std::map<std::string, Setter> words = [] {
    std::map<std::string, Setter> all;
    const std::pair<const char*, Compare> compares[] = {
        {"eq", Compare::kEq},   {"ne", Compare::kNe},   {"lt", Compare::kLt},   {"le", Compare::kLe},
        {"gt", Compare::kGt},   {"ge", Compare::kGe},   {"lo", Compare::kLt},   {"ls", Compare::kLe},
        {"hi", Compare::kGt},   {"hs", Compare::kGe},   {"equ", Compare::kEqu}, {"neu", Compare::kNeu},
        {"ltu", Compare::kLtu}, {"leu", Compare::kLeu}, {"gtu", Compare::kGtu}, {"geu", Compare::kGeu},
        {"num", Compare::kNum}, {"nan", Compare::kNan}};
    for (const auto& [word, compare] : compares) all[word] = Set(&Instruction::compare, compare);
    return all;
  }();
  return words;
}

// Words whose meaning does not depend on the opcode.
const std::map<std::string, Setter>& CommonWords() {
  static const std::map<std::string, Setter> words = {
      {"global", Set(&Instruction::space, Space::kGlobal)},
      {"param", Set(&Instruction::space, Space::kParam)},
      {"shared", Set(&Instruction::space, Space::kShared)},
      {"local", Set(&Instruction::space, Space::kLocal)},
      {"rn", Set(&Instruction::rounding, Rounding::kNearest)},
      {"rni", Set(&Instruction::rounding, Rounding::kNearest)},
      {"rzi", Set(&Instruction::rounding, Rounding::kZero)},
      {"rmi", Set(&Instruction::rounding, Rounding::kDown)},
      {"rpi", Set(&Instruction::rounding, Rounding::kUp)},
      {"lo", Set(&Instruction::part, Part::kLow)},
      {"hi", Set(&Instruction::part, Part::kHigh)},
      {"wide", Set(&Instruction::part, Part::kWide)},
      {"sat", Set(&Instruction::saturate, true)},
      {"ballot", Set(&Instruction::action, Action::kBallot)},
      {"any", Set(&Instruction::action, Action::kAny)},
      {"all", Set(&Instruction::action, Action::kAll)},
      {"up", Set(&Instruction::action, Action::kUp)},
      {"down", Set(&Instruction::action, Action::kDown)},
      {"bfly", Set(&Instruction::action, Action::kXor)},
      {"idx", Set(&Instruction::action, Action::kIdx)},
      {"add", Set(&Instruction::action, Action::kAdd)},
      {"min", Set(&Instruction::action, Action::kMin)},
      {"max", Set(&Instruction::action, Action::kMax)},
      {"exch", Set(&Instruction::action, Action::kExch)},
      // Hints and orders that one thread at a time does not see; vectors are known by their operands.
      {"to", Nothing()},
      {"uni", Nothing()},
      {"sync", Nothing()},
      {"cs", Nothing()},
      {"nc", Nothing()},
      {"ca", Nothing()},
      {"cg", Nothing()},
      {"v2", Nothing()},
      {"v4", Nothing()},
      {"relaxed", Nothing()},
      {"gpu", Nothing()},
      {"aligned", Nothing()}};
  return words;
}

[[noreturn]] void Refuse(const char* why, const std::string& text) { throw Fault(std::string(why) + ": " + text); }

void TakeWord(Instruction* i, const std::string& word, const std::string& text) {
  if (word == "approx" || word == "ftz" || word == "full") Refuse("not reproducible", text);
  const bool combines = i->op == Opcode::kSetp || i->op == Opcode::kAtom;
  if (combines && (word == "and" || word == "or" || word == "xor")) {
    i->combine = word == "and" ? Combine::kAnd : word == "or" ? Combine::kOr : Combine::kXor;
    i->action = word == "and" ? Action::kAnd : word == "or" ? Action::kOr : Action::kNone;
    return;
  }
  if (i->op == Opcode::kShf) {  // shf.l.wrap
    const bool wrap = text.find(".wrap") != std::string::npos, left = text.find("shf.l") != std::string::npos;
    i->shift = left ? (wrap ? ShiftMode::kLeftWrap : ShiftMode::kLeftClamp)
                    : (wrap ? ShiftMode::kRightWrap : ShiftMode::kRightClamp);
    if (word == "l" || word == "r" || word == "wrap" || word == "clamp") return;
  }
  if (i->op == Opcode::kBar && word == "warp") {
    i->op = Opcode::kBarWarp;
    return;
  }
  const auto& table = i->op == Opcode::kSetp ? CompareWords() : CommonWords();
  const auto found = table.find(word);
  if (found == table.end()) Refuse("unsupported", text);
  found->second(i);
}

// ptxas may contract a float mul and add that do not say how they round.
void CheckRounding(const Instruction& i, const std::string& text) {
  const bool is_float = i.type.kind == Kind::kFloat || i.type.kind == Kind::kBfloat;
  if (!is_float) return;
  const bool rounds = i.op == Opcode::kAdd || i.op == Opcode::kSub || i.op == Opcode::kMul || i.op == Opcode::kDiv ||
                      i.op == Opcode::kFma || i.op == Opcode::kSqrt || i.op == Opcode::kRcp;
  if (rounds && i.rounding != Rounding::kNearest) Refuse("may be contracted, no .rn", text);
  const bool moves = i.op == Opcode::kMov || i.op == Opcode::kLd || i.op == Opcode::kSt || i.op == Opcode::kCvt;
  if (!moves && (i.type.bits != 32 || i.type.kind == Kind::kBfloat)) Refuse("unsupported", text);
  if (i.op == Opcode::kMad || i.op == Opcode::kRem || i.saturate) Refuse("unsupported", text);
}

}  // namespace

bool ReadType(const std::string& word, Type* type) {
  if (word == "pred") {
    *type = {Kind::kPredicate, 1};
    return true;
  }
  if (word == "bf16") {
    *type = {Kind::kBfloat, 16};
    return true;
  }
  static const std::map<char, Kind> kinds = {
      {'b', Kind::kBits}, {'u', Kind::kUnsigned}, {'s', Kind::kSigned}, {'f', Kind::kFloat}};
  const auto kind = kinds.find(word.empty() ? '?' : word[0]);
  if (kind == kinds.end()) return false;
  for (int bits : {8, 16, 32, 64}) {
    if (word.substr(1) != std::to_string(bits)) continue;
    *type = {kind->second, bits};
    return true;
  }
  return false;
}

Instruction DecodeWords(const std::string& words, const std::string& text) {
  Instruction i;
  i.text = text;
  std::stringstream in(words);
  std::string word;
  std::getline(in, word, '.');
  const auto opcode = Opcodes().find(word);
  if (opcode == Opcodes().end()) Refuse("unsupported", text);
  i.op = opcode->second;
  i.returns = word != "red";
  int types = 0;
  while (std::getline(in, word, '.')) {
    Type type;
    if (!ReadType(word, &type)) {
      TakeWord(&i, word, text);
      continue;
    }
    if (types++ == 0) i.type = type;
    i.from = type;
  }
  if (types > (i.op == Opcode::kCvt || i.op == Opcode::kSetp ? 2 : 1)) Refuse("unsupported", text);
  CheckRounding(i, text);
  return i;
}

}  // namespace spectrumkv::ptx
