// Reads values out of the configuration as GetConfig prints it (spectrumkvd --print-config): its canonical form, not YAML
// at large.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace spectrumkv::ctl {

class ConfigText {
 public:
  explicit ConfigText(std::string text) : text_(std::move(text)) {}
  // Of "memory.max_pools"; without quotes. Nothing where the text has no such key.
  std::optional<std::string> Value(const std::string& key) const;
  // Whole numbers and sizes such as 4GiB.
  std::optional<uint64_t> Number(const std::string& key) const;
  // Of "[a, b]".
  std::vector<std::string> List(const std::string& key) const;

 private:
  std::string text_;
};

}  // namespace spectrumkv::ctl
