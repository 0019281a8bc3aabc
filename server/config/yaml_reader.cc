#include "server/config/yaml_reader.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <exception>
#include <sstream>
#include <utility>

namespace spectrumkv {
namespace {

constexpr size_t kMaxDepth = 8;
constexpr size_t kMaxNodes = 10000;

// Leaves yaml-cpp's parser; caught in ReadYaml.
struct Refusal : std::exception {
  explicit Refusal(YamlError e) : error(std::move(e)) {}
  YamlError error;
};

[[noreturn]] void Refuse(const YAML::Mark& mark, const std::string& message) {
  throw Refusal({mark.line + 1, mark.column + 1, message});
}

class TreeBuilder final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) Refuse(mark, "a second document; one file is one configuration");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Add(Make(YamlNode::Kind::kNull, mark, "", anchor));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { Refuse(mark, "aliases are not supported"); }
  void OnAnchor(const YAML::Mark& mark, const std::string&) override { Refuse(mark, "anchors are not supported"); }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node = Make(YamlNode::Kind::kScalar, mark, tag, anchor);
    node.scalar = value;
    Add(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(Make(YamlNode::Kind::kList, mark, tag, anchor));
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(Make(YamlNode::Kind::kMap, mark, tag, anchor));
  }
  void OnMapEnd() override { Close(); }

  YamlNode TakeRoot() { return std::move(root_); }

 private:
  YamlNode Make(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != 0) Refuse(mark, "anchors are not supported");
    if (!tag.empty() && tag != "?" && tag != "!") Refuse(mark, "tags are not supported");
    if (++nodes_ > kMaxNodes) Refuse(mark, "more than " + std::to_string(kMaxNodes) + " values");
    YamlNode node;
    node.kind = kind;
    node.line = mark.line + 1;
    node.column = mark.column + 1;
    return node;
  }
  void Open(YamlNode node) {
    if (open_.size() >= kMaxDepth) {
      throw Refusal({node.line, node.column, "nested deeper than " + std::to_string(kMaxDepth) + " levels"});
    }
    open_.push_back(std::move(node));
  }
  void Close() {
    YamlNode node = std::move(open_.back());
    open_.pop_back();
    Add(std::move(node));
  }
  void Add(YamlNode node) {
    if (open_.empty()) {
      root_ = std::move(node);
    } else {
      open_.back().children.push_back(std::move(node));
    }
  }

  YamlNode root_;
  std::vector<YamlNode> open_;  // containers not closed yet, outermost first
  size_t nodes_ = 0;
  int documents_ = 0;
};

// yaml-cpp guesses encodings and passes control characters on; a configuration has neither.
bool IsPlainText(const std::string& text, YamlError* error) {
  int line = 1;
  int column = 1;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n' && c != '\r' && c != '\t') || byte == 0x7f || byte >= 0xfe) {
      *error = {line, column, "not a text file: byte " + std::to_string(byte)};
      return false;
    }
    column = c == '\n' ? 1 : column + 1;
    line += c == '\n' ? 1 : 0;
  }
  return true;
}

}  // namespace

bool ReadYaml(const std::string& text, YamlNode* root, YamlError* error) {
  if (!IsPlainText(text, error)) return false;
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    TreeBuilder builder;
    while (parser.HandleNextDocument(builder)) {
    }
    *root = builder.TakeRoot();
    return true;
  } catch (const Refusal& refusal) {
    *error = refusal.error;
  } catch (const YAML::Exception& exception) {
    const bool placed = !exception.mark.is_null();
    *error = {placed ? exception.mark.line + 1 : 1, placed ? exception.mark.column + 1 : 1,
              "not valid YAML: " + exception.msg};
  } catch (const std::exception& exception) {
    *error = {1, 1, std::string("cannot be read as YAML: ") + exception.what()};
  }
  return false;
}

}  // namespace spectrumkv
