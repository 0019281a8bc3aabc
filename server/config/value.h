// One value: from text to the member of Config, and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/config/keys.h"

namespace spectrumkv {

// A value as written: one text, or a list of them.
struct RawValue {
  bool is_list = false;
  std::vector<std::string> items;  // exactly one unless is_list
};

// Sets the key's member. "" if it is valid; otherwise what is wrong with it, and `config` is unchanged.
std::string SetValue(const KeySpec& key, const RawValue& value, Config* config);

// For environment and flags: "RAW,Q8" and "[RAW, Q8]" are lists where the key is one.
RawValue SplitForKey(const KeySpec& key, const std::string& text);

// As YAML: quoted where it must be.
std::string FormatValue(const KeySpec& key, const Config& config);

// The host and port of "host:port" or "[v6]:port". "" if it is one, otherwise what is wrong.
std::string ParseAddress(const std::string& text, std::string* host, uint16_t* port);

// "2MiB", "1536KiB", "1000": the largest binary unit that divides it.
std::string BytesText(uint64_t bytes);
// The shortest decimal that reads back as `value`, never with an exponent below 2^53.
std::string NumberText(double value);
// "\"...\"", escaped and cut to what fits a message.
std::string QuoteForMessage(const std::string& text);

}  // namespace spectrumkv
