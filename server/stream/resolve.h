// The places of a host and port, found within a time: the system's resolver itself waits as long as it likes.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

namespace spectrumkv {

struct Place {
  sockaddr_storage address = {};
  socklen_t address_bytes = 0;
};

// Empty where nothing was found in time. Addresses need no resolver; a name is asked for on a thread of its own, which
// goes on alone after timeout_ms. Of such threads there are at most 4: a name that comes while all of them hang is not
// found. Thread-safe.
std::vector<Place> Resolve(const std::string& host, const std::string& port, int64_t timeout_ms);

}  // namespace spectrumkv
