// NumPy's .npy files, version 1 to 3, as far as KV caches and scores need them: C order, little-endian.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spectrumkv::ctl {

struct Array {
  std::string descr;  // "<f2", "<f4", "<u2" (bfloat16 words)
  std::vector<uint64_t> shape;
  std::string data;
};

// INVALID_ARGUMENT (BAD_FILE) says why not. Regular files only: a device or a pipe has no end to wait for.
absl::StatusOr<std::string> ReadFile(const std::string& path);
absl::Status WriteFile(const std::string& path, const std::string& data);

// INVALID_ARGUMENT (BAD_NPY) says what is wrong: not npy, Fortran order, a type or size that does not fit.
absl::StatusOr<Array> ParseNpy(const std::string& file);
std::string FormatNpy(const Array& array);

}  // namespace spectrumkv::ctl
