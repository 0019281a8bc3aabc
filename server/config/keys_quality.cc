#include "server/config/key_tables.h"

namespace spectrumkv {

std::vector<KeySpec> MakeQualityKeys() {
  return {
      {"quality.gate",
       KeyKind::kChoice,
       Ref(FIELD(quality.gate)),
       "",
       0,
       0,
       {"off", "warn", "enforce"},
       "What happens to tiers of quality.gated_tiers that no probe (ProbeService) has opened to a model. warn: they "
       "are used, "
       "counted and named in reports. enforce: requests that name them are refused, others do without them. Use "
       "enforce "
       "where models change: a new revision has no verdict."},
      {"quality.gated_tiers",
       KeyKind::kChoices,
       Ref(FIELD(quality.gated_tiers)),
       "",
       0,
       0,
       {"Q8", "Q4", "Q3", "Q2", "P8", "P4"},
       "Tiers that are closed to a model until a probe opens them. 8 bits were harmless with every model that was "
       "measured."},
      {"quality.verdicts_file",
       KeyKind::kFile,
       Ref(FIELD(quality.verdicts_file)),
       "path",
       0,
       0,
       {},
       "Where verdicts of probes are kept over restarts, in a folder that exists. A file that is damaged, or that "
       "others may "
       "write, stops the start. Empty: they are forgotten at the end."},
      {"quality.trials",
       KeyKind::kCount,
       Ref(FIELD(quality.trials)),
       "trials",
       1,
       20,
       {},
       "Trials of each kind (needle, continuation, code) in a probe."},
      {"quality.trials_needed",
       KeyKind::kCount,
       Ref(FIELD(quality.trials_needed)),
       "trials",
       1,
       20,
       {},
       "How many of each kind must be passed to open a tier. At most quality.trials."},
      {"quality.min_agreement",
       KeyKind::kRatio,
       Ref(FIELD(quality.min_agreement)),
       "share of tokens",
       0.1,
       1,
       {},
       "Share of the next tokens over coded KV that must be those over exact KV, for a continuation or a program to be "
       "passed."},
  };
}

}  // namespace spectrumkv
