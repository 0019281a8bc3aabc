// Why an address cannot be listened on. Libraries say that it failed; the system says why.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace spectrumkv {

// UNAVAILABLE LISTEN_FAILED for the address of configuration key `key`: host:port, or the path of a Unix socket. The
// cause is what the system answers to another attempt now: the name of its errno ("EADDRINUSE"), or of a resolver's
// error, in the message and in the metadata (key, address, cause). "UNKNOWN" where that attempt works.
absl::Status ListenFailed(const std::string& key, const std::string& address);
// The same, where the errno of listening is known.
absl::Status ListenFailed(const std::string& key, const std::string& address, int error);

}  // namespace spectrumkv
