// The caller in tests that need but one, and the owner of what they make.
#pragma once

#include <unistd.h>

#include "server/base/caller.h"

namespace spectrumkv {

inline const Caller kMe = Caller::Uid(geteuid());

}  // namespace spectrumkv
