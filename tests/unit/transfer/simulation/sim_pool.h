// A pool of the simulation and what its blocks must hold: whatever changes them without leave is seen.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/pool/pool.h"
#include "tests/unit/transfer/engine_fixture.h"
#include "tests/unit/transfer/simulation/scheduler.h"

namespace spectrumkv {

class SimPool {
 public:
  // Null, with the status, where the daemon refuses it.
  static absl::StatusOr<std::shared_ptr<SimPool>> Register(PoolRegistry* registry, uint64_t epoch,
                                                           const PoolLayout& layout, int64_t lease_ms);

  const std::string& id() const { return id_; }
  const PoolLayout& layout() const { return layout_; }
  // False once the daemon does not know the pool any more; asked each time.
  bool alive() const { return registry_->SchemaOf(kMe, id_, epoch_).ok(); }
  // It is being unregistered, which waits for its holds: nothing is read or written meanwhile.
  bool closing() const;
  // New values where nobody uses the block; false where the daemon refuses the write.
  bool Overwrite(uint64_t block, SimRandom* random);
  // The same as a worker does it, in shared memory: the daemon hears nothing of it. From this token of the block on. False
  // where it is a destination now.
  bool Scribble(uint64_t block, uint32_t first_token, SimRandom* random);
  // What the blocks hold now, [layer][plane][token] densely, token_count of them; empty if the daemon refuses.
  std::vector<std::string> Read(const std::vector<BlockRange>& runs, uint32_t tokens) const;
  // The same as they should be.
  std::vector<std::string> Expected(const std::vector<BlockRange>& runs, uint32_t tokens) const;
  // From now on the block should hold what it holds now.
  void Accept(uint64_t block);
  // The same, token by token: `changed` hears of each that is not as it should be. Answers how many, by layer and plane;
  // nothing where the block cannot be read.
  using Changed = std::function<void(size_t plane, uint32_t token, const std::string& before, const std::string& now)>;
  uint64_t AcceptChanges(uint64_t block, const Changed& changed);
  // The same, for when it can next be read: a closing pool tells nothing, and may stay after all.
  void AcceptLater(const std::vector<BlockRange>& runs);
  // Now, where it can be read: before blocks are reserved again.
  void AcceptWhatIsLate();
  // Every block that can be read holds what it should, but for those in `used`.
  void ExpectUntouched(const std::vector<bool>& used, const std::string& what);

 private:
  using Block = std::vector<std::string>;  // by layer and plane
  SimPool(PoolRegistry* registry, uint64_t epoch, PoolLayout layout, std::string id);
  std::optional<Block> ReadBlock(uint64_t block) const;
  size_t TokenBytes() const { return size_t{layout_.heads} * layout_.head_dim * SizeOf(layout_.dtype); }
  template <typename BlockOf>
  std::vector<std::string> Join(const std::vector<BlockRange>& runs, uint32_t tokens, BlockOf block_of) const;

  PoolRegistry* const registry_;
  const uint64_t epoch_;
  const PoolLayout layout_;
  const std::string id_;
  std::vector<Block> model_;
  std::vector<bool> unknown_;  // per block: AcceptLater
};

}  // namespace spectrumkv
