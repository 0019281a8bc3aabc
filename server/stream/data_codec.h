// The messages of a Data stream, by hand, so that chunk bytes are never copied into a message: any ordinary protobuf
// peer reads what this writes and the other way round. DataRequest and DataResponse have the same fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/stream/transport.h"
#include "server/stream/frames.h"

namespace spectrumkv {

// Where the chunk's bytes lie in the message.
struct ChunkExtent {
  size_t offset = 0;
  size_t bytes = 0;
};
using DataMessage = std::variant<DataOpenFrame, ChunkExtent>;

// `pieces` are the message's bytes in order. Unknown fields are skipped and the last of several frames counts, as
// protobuf has it. MALFORMED_FRAME for anything else.
absl::StatusOr<DataMessage> ParseDataMessage(const std::vector<ByteSpan>& pieces);

std::string SerializeDataOpen(const DataOpenFrame& open);

// What stands before the chunk's bytes in its message. Returns how many of `out` were written.
constexpr size_t kMaxChunkPrefixBytes = 11;
size_t WriteChunkPrefix(size_t chunk_bytes, uint8_t out[kMaxChunkPrefixBytes]);

}  // namespace spectrumkv
