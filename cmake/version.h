// The version of this build, for --version and the daemon's status.
#pragma once

namespace spectrumkv {

// Of the project: "0.1.0".
const char* Version();

// With the commit where it was built in a git checkout: "0.1.0 (2abdeda)", "0.1.0 (v0.1.0-3-g2abdeda-dirty)".
const char* VersionText();

}  // namespace spectrumkv
