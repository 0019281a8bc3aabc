// What no key can say alone.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/config/config.h"

namespace spectrumkv {

struct CheckFailure {
  std::vector<std::string> keys;  // the first is where the message points
  std::string message;
};

// Every rule over several keys that `config` breaks.
std::vector<CheckFailure> CheckTogether(const Config& config);

}  // namespace spectrumkv
