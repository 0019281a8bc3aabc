#include "tests/golden/vector_index.h"

#include <cctype>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace spectrumkv::golden {
namespace {

class Parser {
 public:
  explicit Parser(std::string text) : text_(std::move(text)) {}

  VectorIndex Index() {
    VectorIndex index;
    Expect('{');
    do {
      const std::string name = String();
      Expect(':');
      std::vector<VectorEntry>& list = index[name];
      Expect('[');
      if (!Accept(']')) {
        do {
          list.push_back(Entry());
        } while (Accept(','));
        Expect(']');
      }
    } while (Accept(','));
    Expect('}');
    if (Peek() != '\0') Fail("trailing text");
    return index;
  }

 private:
  VectorEntry Entry() {
    VectorEntry entry;
    Expect('{');
    do {
      const std::string key = String();
      Expect(':');
      entry.fields[key] = Peek() == '"' ? String() : Bare();
    } while (Accept(','));
    Expect('}');
    return entry;
  }

  std::string String() {
    Expect('"');
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') Fail("escapes are not used in the index");
      value += text_[at_++];
    }
    if (at_ == text_.size()) Fail("string without an end");
    ++at_;
    return value;
  }

  std::string Bare() {
    std::string value;
    while (at_ < text_.size() && std::isalnum(static_cast<unsigned char>(text_[at_]))) value += text_[at_++];
    if (value.empty()) Fail("a value is missing");
    return value;
  }

  char Peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Accept(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }

  void Expect(char c) {
    if (!Accept(c)) Fail(std::string("expected ") + c);
  }

  [[noreturn]] void Fail(const std::string& what) {
    throw std::runtime_error("index.json: " + what + " at byte " + std::to_string(at_));
  }

  std::string text_;
  size_t at_ = 0;
};

}  // namespace

std::vector<uint8_t> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return std::vector<uint8_t>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

VectorIndex ReadVectorIndex(const std::string& path) {
  const std::vector<uint8_t> bytes = ReadFile(path);
  return Parser(std::string(bytes.begin(), bytes.end())).Index();
}

}  // namespace spectrumkv::golden
