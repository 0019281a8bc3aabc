// Text of somebody else's, as it may be shown: in an error, a report, a list.
#pragma once

#include <cstddef>
#include <string>

namespace spectrumkv {

// The beginning of `text`, at most `max_bytes`, whole characters. Bytes that are no UTF-8, and control characters,
// which would move the cursor of a terminal or begin a line of a log, are '?' each.
std::string CleanText(const std::string& text, size_t max_bytes);

}  // namespace spectrumkv
