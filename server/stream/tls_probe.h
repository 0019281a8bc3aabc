// Whether a peer that hung up on a plain connection speaks TLS.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace spectrumkv {

// True where what listens on `address` (host:port) answers the first words of a TLS client as a TLS server does. Blocks:
// at most about timeout_ms, names included.
bool SpeaksTls(const std::string& address, int64_t timeout_ms);

// Remembers answers for a second, so that a peer is asked once however many streams it hangs up on. Thread-safe; Ask
// blocks as SpeaksTls.
class TlsProbe {
 public:
  bool Ask(const std::string& address);

 private:
  struct Answer {
    int64_t at_ns = 0;
    bool tls = false;
  };
  std::mutex mutex_;
  std::map<std::string, Answer> answers_;
};

}  // namespace spectrumkv
