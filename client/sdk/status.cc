#include "spectrumkv/status.h"

namespace spectrumkv {

const char* NameOf(Code code) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",           "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
      "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
      "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"};
  const auto index = static_cast<unsigned>(code);
  return index < sizeof(kNames) / sizeof(kNames[0]) ? kNames[index] : "UNKNOWN";
}

std::string Status::ToString() const {
  if (ok()) return NameOf(code);
  std::string words = NameOf(code);
  if (!reason.empty()) words += " " + reason;
  words += ": " + message;
  const char* before = " (";
  for (const auto& [name, value] : metadata) {
    words += before + name + "=" + value;
    before = ", ";
  }
  return metadata.empty() ? words : words + ")";
}

}  // namespace spectrumkv
