// Block tables as requests state them.
#pragma once

#include <cstdint>
#include <vector>

#include "spectrumkv/v1/schema.pb.h"

namespace spectrumkv::client {

// Block ids in token order, neighbours joined into runs.
v1::GroupBlocks Blocks(uint32_t group, const std::vector<uint64_t>& block_ids);

// Blocks that `tokens` tokens need.
uint64_t BlocksFor(uint64_t tokens, uint32_t block_tokens);

}  // namespace spectrumkv::client
