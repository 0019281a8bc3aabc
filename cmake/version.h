// The version of this build, for --version, build_info and the daemon's status.
#pragma once

namespace spectrumkv {

// Of the project: "0.1.0".
const char* Version();

// The git commit it was built from: "2abdeda01c3f", "2abdeda01c3f-dirty" where files differed from it, "unknown" where
// the sources were no git checkout.
const char* Revision();

// Both: "0.1.0 (2abdeda01c3f)".
const char* VersionText();

}  // namespace spectrumkv
