// Staging as a seam: the one place where the engine asks for memory that it may be refused, new (std::nothrow) [].
#pragma once

namespace spectrumkv {

// Until it is called with false, there is none. Not while other threads ask.
void RefuseNothrowNew(bool refused);

}  // namespace spectrumkv
