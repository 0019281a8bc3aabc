#pragma once

#include <string>

namespace spectrumkv {

struct HostPort {
  std::string host;  // an IPv6 address without its brackets
  std::string port;
};

// "10.0.0.1:80", "name:80", "[::1]:80". Without a colon all of it is host, and port is empty.
HostPort SplitHostPort(const std::string& address);

// "[::1]" -> "::1"; others as they are.
std::string WithoutBrackets(const std::string& host);

}  // namespace spectrumkv
