// The shape of a YAML file with the place of everything in it. The only user of yaml-cpp.
#pragma once

#include <string>
#include <vector>

namespace spectrumkv {

struct YamlNode {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string scalar;
  std::vector<YamlNode> children;  // of a map: key, value, key, value, ...
  int line = 1;                    // both count from 1
  int column = 1;
};

struct YamlError {
  int line = 1;
  int column = 1;
  std::string message;
};

// True and `root` (null for an empty text), or false and `error`. One document, plain values, lists and maps only:
// anchors, aliases, tags, nesting beyond 8 and more than 10000 values are refused, so what is small stays small.
// Never throws.
bool ReadYaml(const std::string& text, YamlNode* root, YamlError* error);

}  // namespace spectrumkv
