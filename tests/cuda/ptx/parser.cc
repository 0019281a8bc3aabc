#include "tests/cuda/ptx/parser.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "tests/cuda/ptx/decode_words.h"

namespace spectrumkv::ptx {
namespace {

std::string Trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool StartsWith(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// "... .align 8 .b8 name[200]" or "... .u64 name".
struct Declaration {
  std::string name;
  int bytes = 0, align = 1;
};

Declaration ReadDeclaration(const std::string& text) {
  Declaration declared;
  const size_t bracket = text.find('[');
  const std::string head = Trim(text.substr(0, bracket));
  declared.name = head.substr(head.find_last_of(" \t") + 1);
  std::stringstream in(head);
  std::string word;
  int element = 0;
  while (in >> word) {
    Type type;
    if (word == ".align") {
      in >> declared.align;
    } else if (word[0] == '.' && ReadType(word.substr(1), &type)) {
      element = type.bits / 8;
    }
  }
  if (element == 0) throw Fault("declaration without a type: " + text);
  declared.align = std::max(declared.align, element);
  declared.bytes = bracket == std::string::npos ? element : element * std::atoi(text.c_str() + bracket + 1);
  return declared;
}

// Splits at commas outside of brackets and braces.
std::vector<std::string> SplitOperands(const std::string& text) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) part = Trim(part);
  if (parts.size() == 1 && parts[0].empty()) parts.clear();
  return parts;
}

// One .entry at a time.
class KernelParser {
 public:
  KernelParser(std::string name, const std::string& params, const std::string& body) {
    kernel_.name = std::move(name);
    for (const std::string& param : SplitOperands(params)) Place(param, &kernel_.param_bytes);
    Statements(body);
    kernel_.registers = static_cast<int>(registers_.size());
    for (Instruction& i : kernel_.code) {
      if (i.op != Opcode::kBra) continue;
      const auto label = labels_.find(Trim(i.text.substr(i.text.find_last_of(" \t") + 1)));
      if (label == labels_.end()) throw Fault("no such label: " + i.text);
      i.target = label->second;
    }
  }

  Kernel Take() { return std::move(kernel_); }

 private:
  void Place(const std::string& text, int* top) {
    const Declaration declared = ReadDeclaration(text);
    *top = (*top + declared.align - 1) / declared.align * declared.align;
    symbols_[declared.name] = *top;
    *top += declared.bytes;
  }

  void Statements(const std::string& body) {
    std::string statement;
    int vector_depth = 0;
    for (char c : body) {
      if (c == '{' && Trim(statement).empty()) continue;  // a scope
      if (c == '}' && vector_depth == 0) {
        if (!Trim(statement).empty()) throw Fault("statement without an end: " + statement);
        continue;
      }
      vector_depth += (c == '{') - (c == '}');
      if (c == ':' && statement.find('.') == std::string::npos) {
        labels_[Trim(statement)] = static_cast<int>(kernel_.code.size());
        statement.clear();
      } else if (c == ';') {
        Statement(Trim(statement));
        statement.clear();
      } else {
        statement += c == '\n' ? ' ' : c;
      }
    }
  }

  void Statement(const std::string& text) {
    if (text.empty() || StartsWith(text, ".pragma") || StartsWith(text, ".loc ")) return;
    if (StartsWith(text, ".reg")) return Registers(text);
    if (StartsWith(text, ".shared")) return Place(text, &kernel_.shared_bytes);
    if (StartsWith(text, ".local")) return Place(text, &kernel_.local_bytes);
    Instruction i;
    try {
      i = Decode(text);
    } catch (const Fault& fault) {
      i = Instruction();
      i.text = fault.what();
    }
    kernel_.code.push_back(std::move(i));
  }

  // ".reg .b32 %r<65>" or ".reg .pred p, q".
  void Registers(const std::string& text) {
    const size_t type = text.find_first_of(" \t");
    const size_t names = text.find_first_of(" \t", text.find_first_not_of(" \t", type));
    for (const std::string& name : SplitOperands(text.substr(names))) {
      const size_t range = name.find('<');
      declared_.insert(range == std::string::npos ? name : name.substr(0, range + 1));
    }
  }

  int Register(const std::string& name) {
    const std::string family = name.substr(0, name.find_last_not_of("0123456789") + 1) + "<";
    if (declared_.count(name) == 0 && declared_.count(family) == 0) throw Fault("unknown name " + name);
    return registers_.emplace(name, static_cast<int>(registers_.size())).first->second;
  }

  Instruction Decode(const std::string& text) {
    std::string rest = text;
    int guard = -1;
    const bool negated = StartsWith(rest, "@!");
    if (rest[0] == '@') {
      const size_t end = rest.find_first_of(" \t"), begin = negated ? 2 : 1;
      guard = Register(rest.substr(begin, end - begin));
      rest = Trim(rest.substr(end));
    }
    const size_t end = rest.find_first_of(" \t");
    Instruction i = DecodeWords(rest.substr(0, end), text);
    i.guard = guard;
    i.guard_negated = negated;
    if (end == std::string::npos || i.op == Opcode::kBra) return i;
    const std::vector<std::string> parts = SplitOperands(rest.substr(end));
    const bool no_result = i.op == Opcode::kSt || i.op == Opcode::kBar || i.op == Opcode::kBarWarp || !i.returns;
    for (size_t n = 0; n < parts.size(); ++n) Operands(parts[n], n == 0 && !no_result, &i);
    return i;
  }

  void Operands(const std::string& text, bool out, Instruction* i) {
    std::vector<Operand>* to = out ? &i->outs : &i->ins;
    if (text[0] == '{') {
      for (const std::string& one : SplitOperands(text.substr(1, text.size() - 2))) to->push_back(ReadOperand(one));
      return;
    }
    const size_t bar = text.find('|');
    to->push_back(ReadOperand(Trim(text.substr(0, bar))));
    if (bar != std::string::npos) i->predicate_out = Register(Trim(text.substr(bar + 1)));
  }

  Operand ReadOperand(std::string text) {
    Operand operand;
    if (text[0] == '[') {
      operand.form = Operand::kAddress;
      text = text.substr(1, text.size() - 2);
      const size_t plus = text.find('+');
      if (plus != std::string::npos) {
        operand.value = static_cast<uint64_t>(std::stoll(text.substr(plus + 1), nullptr, 0));
        text = Trim(text.substr(0, plus));
      }
      if (const auto symbol = symbols_.find(text); symbol != symbols_.end()) {
        operand.value += static_cast<uint64_t>(symbol->second);
      } else {
        operand.reg = Register(text);
      }
      return operand;
    }
    if (text[0] == '!') {
      operand.negated = true;
      text = text.substr(1);
    }
    static const std::map<std::string, Special> specials = {{"%tid.x", Special::kTid},
                                                            {"%ntid.x", Special::kNtid},
                                                            {"%ctaid.x", Special::kCtaid},
                                                            {"%ctaid.y", Special::kCtaidY},
                                                            {"%nctaid.x", Special::kNctaid},
                                                            {"%nctaid.y", Special::kNctaidY},
                                                            {"%laneid", Special::kLane}};
    if (const auto special = specials.find(text); special != specials.end()) {
      operand.form = Operand::kSpecial;
      operand.special = special->second;
    } else if (const auto symbol = symbols_.find(text); symbol != symbols_.end()) {
      operand.value = static_cast<uint64_t>(symbol->second);
    } else if (StartsWith(text, "0f")) {
      operand.value = std::stoull(text.substr(2), nullptr, 16);
    } else if (text[0] == '-') {
      operand.value = static_cast<uint64_t>(std::stoll(text, nullptr, 0));
    } else if (std::isdigit(static_cast<unsigned char>(text[0])) != 0) {
      operand.value = std::stoull(text, nullptr, 0);
    } else if (text == "WARP_SZ") {
      operand.value = 32;
    } else {
      operand.form = Operand::kRegister;
      operand.reg = Register(text);
    }
    return operand;
  }

  Kernel kernel_;
  std::set<std::string> declared_;  // names, or families that end with <
  std::map<std::string, int> registers_, symbols_, labels_;
};

std::string WithoutComments(const std::string& text) {
  std::stringstream in(text);
  std::string line, kept;
  while (std::getline(in, line)) kept += line.substr(0, line.find("//")) + "\n";
  return kept;
}

}  // namespace

Module::Module(const std::string& raw) {
  const std::string text = WithoutComments(raw);
  if (text.find(".func") != std::string::npos) throw Fault("unsupported: .func");
  for (size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at)) {
    const size_t open = text.find('(', at), close = text.find(')', open), body = text.find('{', close);
    if (body == std::string::npos) throw Fault("an .entry without a body");
    size_t end = body;
    int depth = 0;
    do {
      if (end == text.size()) throw Fault("an .entry without an end");
      depth += (text[end] == '{') - (text[end] == '}');
      ++end;
    } while (depth != 0);
    const std::string name = Trim(text.substr(at + 6, open - at - 6));
    KernelParser parser(name, text.substr(open + 1, close - open - 1), text.substr(body + 1, end - body - 2));
    kernels_[name] = parser.Take();
    at = end;
  }
}

Module Module::Load(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) throw Fault("cannot read " + path);
  return Module(text.str());
}

const Kernel& Module::Find(const std::string& name) const {
  const auto found = kernels_.find(name);
  if (found == kernels_.end()) throw Fault("no kernel " + name);
  return found->second;
}

std::vector<std::string> Module::Refused() const {
  std::vector<std::string> refused;
  for (const auto& [name, kernel] : kernels_) {
    for (const Instruction& i : kernel.code) {
      if (i.op == Opcode::kRefused) refused.push_back(name + ": " + i.text);
    }
  }
  return refused;
}

}  // namespace spectrumkv::ptx
