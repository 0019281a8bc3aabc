#include "server/base/ids.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace spectrumkv {
namespace {

void FillRandom(void* data, size_t size) {
  auto* at = static_cast<unsigned char*>(data);
  while (size > 0) {
    const ssize_t got = getrandom(at, size, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      // Without randomness fences and tokens are worthless: there is no safe way to go on.
      std::perror("spectrumkv: getrandom");
      std::abort();
    }
    at += got;
    size -= static_cast<size_t>(got);
  }
}

}  // namespace

bool IsIdCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == ':' || c == '-';
}

bool IsId(const std::string& id) {
  return !id.empty() && id.size() <= kMaxIdBytes && std::all_of(id.begin(), id.end(), IsIdCharacter);
}

std::string IdRule() { return "1 to " + std::to_string(kMaxIdBytes) + " of A-Z a-z 0-9 . _ : -"; }

uint64_t RandomU64() {
  uint64_t value = 0;
  while (value == 0) FillRandom(&value, sizeof(value));
  return value;
}

std::string RandomHex(size_t bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string random(bytes, '\0');
  FillRandom(random.data(), random.size());
  std::string hex;
  hex.reserve(2 * bytes);
  for (const char c : random) {
    const auto byte = static_cast<unsigned char>(c);
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

bool ConstantTimeEqual(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference =
        static_cast<unsigned char>(difference | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i])));
  }
  return difference == 0;
}

}  // namespace spectrumkv
