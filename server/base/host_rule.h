// Which hosts may be dialled: networks and names.
//
//   10.1.0.0/16, fd00::/8, 10.1.2.3     addresses; without a prefix length, that one
//   decode-0.example, *.decode.example  names, "*" for one whole label
//
// Names are compared as they are written, never resolved: who allows a name trusts whoever answers for it, and an
// address that a name stands for is allowed only by a network.
#pragma once

#include <string>
#include <vector>

namespace spectrumkv {

// "" if `rule` is one, otherwise what is wrong with it.
std::string CheckHostRule(const std::string& rule);

// Whether `host` (an address, IPv6 with or without brackets, or a name) fits one of `rules`; all do where there are
// none. REQUIRES: rules that CheckHostRule takes.
bool AllowsHost(const std::vector<std::string>& rules, const std::string& host);

}  // namespace spectrumkv
