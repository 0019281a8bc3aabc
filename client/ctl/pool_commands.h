// Pools as flags name them, shared by the commands that use one.
#pragma once

#include "client/cpp/schema.h"
#include "client/ctl/command.h"

namespace spectrumkv::ctl {

// --pool, --epoch.
std::vector<Flag> PoolFlags();
// The pool that these flags name; without --epoch the daemon's current one.
absl::StatusOr<v1::PoolRef> ReadPool(const Context& context, Args* args);

// --layers, --heads, --head-dim, --dtype, --block-tokens, --model, --revision, --lease: of a pool the daemon owns.
std::vector<Flag> ShapeFlags();
client::DenseLayout ReadShape(Args* args);
// Registers a pool of layout.num_blocks blocks in memory of the daemon. Its lease lasts --lease seconds (default 600),
// as no worker holds it.
absl::StatusOr<v1::RegisterPoolResponse> CreatePool(const Context& context, client::Client* worker,
                                                    const client::DenseLayout& layout, int64_t lease_ms);
int64_t ReadLease(Args* args);

}  // namespace spectrumkv::ctl
