#!/usr/bin/env bash
# run.sh PROGRAM SEEDS [SUFFIX]: libFuzzer for SPECTRUMKV_FUZZ_SECONDS (300), from the committed seeds and from what earlier
# runs in this build folder found, with the dictionary beside the seeds if there is one. Prints how many inputs it ran. An
# input that breaks the target stays in PROGRAM_work/found.
set -euo pipefail
program=$1 seeds=$2 suffix=${3:-}
work=${program}_work
mkdir -p "$work/corpus" "$work/seeds" "$work/found"
find "$seeds" -type f -name "*$suffix" -exec cp -t "$work/seeds" {} +
options=()
for dictionary in "$seeds"/../*.dict; do
  if [ -f "$dictionary" ]; then options+=("-dict=$dictionary"); fi
done
# The memory that ASan keeps from use is fresh to every input: with 256 MiB of it a good part of the time goes into pages.
export ASAN_OPTIONS="quarantine_size_mb=8:malloc_context_size=8${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
# An input that takes seconds or gigabytes is a fault too.
"$program" -max_total_time="${SPECTRUMKV_FUZZ_SECONDS:-300}" -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
  -artifact_prefix="$work/found/" "${options[@]}" "$work/corpus" "$work/seeds" 2>&1 \
  | tail -n 200 # the end says how it went; a long run has megabytes
