#include "server/base/host_port.h"

namespace spectrumkv {

std::string WithoutBrackets(const std::string& host) {
  const bool bracketed = host.size() > 1 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

HostPort SplitHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return {WithoutBrackets(address), ""};
  return {WithoutBrackets(address.substr(0, colon)), address.substr(colon + 1)};
}

}  // namespace spectrumkv
