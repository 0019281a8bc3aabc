#include "client/cpp/blocks.h"

namespace spectrumkv::client {

v1::GroupBlocks Blocks(uint32_t group, const std::vector<uint64_t>& block_ids) {
  v1::GroupBlocks blocks;
  blocks.set_group(group);
  v1::BlockRun* run = nullptr;
  for (const uint64_t id : block_ids) {
    // From the last id of all it is 0 that comes next in uint64, and that is no neighbour.
    if (run != nullptr && id != 0 && run->first() + run->count() == id) {
      run->set_count(run->count() + 1);
      continue;
    }
    run = blocks.add_runs();
    run->set_first(id);
    run->set_count(1);
  }
  return blocks;
}

uint64_t BlocksFor(uint64_t tokens, uint32_t block_tokens) { return (tokens + block_tokens - 1) / block_tokens; }

}  // namespace spectrumkv::client
