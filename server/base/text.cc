#include "server/base/text.h"

#include <algorithm>
#include <cstdint>

namespace spectrumkv {
namespace {

// Length of the valid UTF-8 sequence at `at`, or 0.
size_t Utf8Length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const auto tail = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return tail(at + 1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (!tail(at + 1) || !tail(at + 2)) return 0;
    if (lead == 0xE0 && byte(at + 1) < 0xA0) return 0;  // overlong
    if (lead == 0xED && byte(at + 1) > 0x9F) return 0;  // surrogates
    return 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (!tail(at + 1) || !tail(at + 2) || !tail(at + 3)) return 0;
    if (lead == 0xF0 && byte(at + 1) < 0x90) return 0;
    if (lead == 0xF4 && byte(at + 1) > 0x8F) return 0;
    return 4;
  }
  return 0;
}

bool IsControl(const std::string& text, size_t at, size_t length) {
  const auto lead = static_cast<uint8_t>(text[at]);
  if (length == 1) return lead < 0x20 || lead == 0x7F;
  return length == 2 && lead == 0xC2 && static_cast<uint8_t>(text[at + 1]) < 0xA0;  // U+0080 to U+009F
}

}  // namespace

std::string CleanText(const std::string& text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t length = Utf8Length(text, i);
    const bool shown = length > 0 && !IsControl(text, i, length);
    if (out.size() + (shown ? length : 1) > max_bytes) break;
    if (shown) {
      out.append(text, i, length);
    } else {
      out += '?';
    }
    i += std::max<size_t>(length, 1);
  }
  return out;
}

}  // namespace spectrumkv
