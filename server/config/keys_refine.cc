#include "server/config/key_tables.h"

namespace spectrumkv {

std::vector<KeySpec> MakeRefineKeys() {
  return {
      {"refine.max_retained",
       KeyKind::kCount,
       Ref(FIELD(refine.max_retained)),
       "transfers",
       0,
       65536,
       {},
       "Committed transfers that are kept so that they can be refined: sources with policy.retain_seconds, and, counted "
       "apart, destinations that are refinable. Sources keep blocks of their workers, destinations a byte for each token "
       "and layer. What comes when there are as many is not kept. 0: none."},
      {"refine.max_retain_seconds",
       KeyKind::kSeconds,
       Ref(FIELD(refine.max_retain_seconds)),
       "s",
       1,
       86400,
       {},
       "What policy.retain_seconds may be at most."},
      {"refine.staging_bytes",
       KeyKind::kBytes,
       Ref(FIELD(refine.staging_bytes)),
       "bytes",
       0,
       kTiB,
       {},
       "Memory in which refined cells wait for ApplyRefinement, of all refinements together; taken as they arrive. A "
       "refinement takes as many cells as there is room for."},
      {"refine.cache_bytes",
       KeyKind::kBytes,
       Ref(FIELD(refine.cache_bytes)),
       "bytes",
       0,
       kTiB,
       {},
       "Memory for the exact words of retained sources whose workers need the blocks back (ReleaseTransfer with "
       "keep_in_cache); taken as sources come. Those that were longest not read go first. 0: no cache, the blocks are "
       "given back and nothing is kept."},
      {"refine.max_rate_bytes",
       KeyKind::kBytes,
       Ref(FIELD(refine.max_rate_bytes)),
       "bytes a second",
       0,
       kTiB,
       {},
       "What the refinements that this daemon sends may take of the network, all together. Whatever it is, they send "
       "nothing while another transfer moves bytes here. 0: no limit."},
  };
}

}  // namespace spectrumkv
