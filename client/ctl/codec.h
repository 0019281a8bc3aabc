// What the codec commands share. They run in this program, without a daemon.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/ctl/command.h"
#include "kernels/codec/registry.h"

namespace spectrumkv::ctl {

const BackendRegistry& Backends();

// The named one, or all that this machine can run for "". USAGE for a name that is unknown or not supported here.
absl::StatusOr<std::vector<const Backend*>> ChooseBackends(const std::string& name);

// Row addresses of a dense [tokens, heads, head_dim] plane.
template <typename Byte>
std::vector<Byte*> Rows(Byte* plane, const ChunkDims& dims) {
  std::vector<Byte*> rows(dims.tokens);
  const uint64_t row_bytes = uint64_t{dims.heads} * dims.head_dim * SizeOf(dims.dtype);
  for (uint32_t t = 0; t < dims.tokens; ++t) rows[t] = plane + t * row_bytes;
  return rows;
}

absl::StatusOr<int> CodecCheck(const Context& context, Args args);
absl::StatusOr<int> CodecBench(const Context& context, Args args);

}  // namespace spectrumkv::ctl
