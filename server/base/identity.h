// Who a peer may be: patterns over the names that a certificate gives.
//
//   spectrumkv                        a DNS name
//   kv.*.example                      any label in the place of "*"
//   spiffe://prod/ns/*/sa/prefill     a URI, any segment in the place of "*"
//
// "*" stands for one whole label or segment, never for a part of one, and not for one that has a "*" itself: a wildcard
// certificate is nobody's identity. DNS names are compared without regard to case, URIs exactly.
#pragma once

#include <string>
#include <vector>

namespace spectrumkv {

// Alternative names of a certificate; its common name counts as a DNS name where there are none.
struct PeerNames {
  std::vector<std::string> dns, uris;
};

// "" if `pattern` is one, otherwise what is wrong with it.
std::string CheckIdentityPattern(const std::string& pattern);

// Whether one of `names` fits one of `patterns`. REQUIRES: patterns that CheckIdentityPattern takes.
bool MatchesIdentity(const std::vector<std::string>& patterns, const PeerNames& names);

// "a, b", cut to what fits a message; "nobody" where there are none.
std::string NamesText(const PeerNames& names);

}  // namespace spectrumkv
