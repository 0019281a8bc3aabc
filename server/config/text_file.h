// Files that people write and the daemon reads at its start.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace spectrumkv {

constexpr size_t kMaxTextFileBytes = 1 << 20;

// Reason CONFIG_FILE, "`what` PATH ..." in the message.
absl::Status TextFileError(absl::StatusCode code, const std::string& what, const std::string& path,
                           const std::string& problem);

// NotFound for a file that cannot be opened, InvalidArgument for one that is not a regular file, cannot be read or is larger
// than kMaxTextFileBytes. Never waits for a writer, as of a FIFO.
absl::StatusOr<std::string> ReadTextFile(const std::string& what, const std::string& path);

}  // namespace spectrumkv
