// Reads tests/golden/vectors/index.json: lists of flat objects, which is all the JSON this needs to know.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace spectrumkv::golden {

// Fields of one vector; strings without quotes, numbers and booleans as written.
class VectorEntry {
 public:
  std::map<std::string, std::string> fields;

  // Throw std::out_of_range where the field is absent, std::invalid_argument where it is no number.
  const std::string& Text(const std::string& key) const { return fields.at(key); }
  uint64_t Number(const std::string& key) const { return std::stoull(fields.at(key)); }
  bool Flag(const std::string& key) const { return fields.at(key) == "true"; }
};

// Lists by name: "cases", "decode_only", "must_fail".
using VectorIndex = std::map<std::string, std::vector<VectorEntry>>;

// Throws std::runtime_error on anything that is not such a file.
VectorIndex ReadVectorIndex(const std::string& path);

// The bytes of a file; throws std::runtime_error where it cannot be read.
std::vector<uint8_t> ReadFile(const std::string& path);

}  // namespace spectrumkv::golden
