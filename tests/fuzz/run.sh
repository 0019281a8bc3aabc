#!/usr/bin/env bash
# run.sh PROGRAM SEEDS [SUFFIX]: libFuzzer for SPECTRUMKV_FUZZ_SECONDS (60), from the committed seeds and from what earlier
# runs in this build folder found. Prints how many inputs it ran. An input that breaks the target stays beside the program.
set -euo pipefail
program=$1 seeds=$2 suffix=${3:-}
work=$(dirname "$program")/$(basename "$program")_work
mkdir -p "$work/corpus" "$work/seeds" "$work/found"
find "$seeds" -type f -name "*$suffix" -exec cp -t "$work/seeds" {} +
# -timeout: an input of seconds is a fault too. -rss_limit_mb: so is one that takes the memory.
exec "$program" -max_total_time="${SPECTRUMKV_FUZZ_SECONDS:-60}" -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
  -artifact_prefix="$work/found/" "$work/corpus" "$work/seeds"
