// Words of errors about requests. Internal to server/service.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "server/base/status.h"

namespace spectrumkv {

// A value from outside, quoted, its control bytes replaced, cut to what fits a message.
inline std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text.substr(0, 64)) out += c >= 0x20 && c < 0x7f && c != '"' && c != '\\' ? c : '?';
  if (text.size() > 64) out += "...";
  return out + "\"";
}

[[nodiscard]] inline absl::Status Invalid(const std::string& reason, const std::string& field,
                                          const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field + " " + what, {{"field", field}});
}
[[nodiscard]] inline absl::Status Unsupported(const std::string& reason, const std::string& field,
                                              const std::string& what) {
  return MakeError(absl::StatusCode::kUnimplemented, reason, field + " " + what, {{"field", field}});
}

}  // namespace spectrumkv
