#!/usr/bin/env bash
# alone.sh CMAKE BUILD_DIR: every header and source compiles alone; takes minutes, so in the long tier.
# scripts/test --long has built the target already.
set -euo pipefail
if [ -z "${SPECTRUMKV_LONG:-}" ]; then
  echo "SKIPPED: files compile alone: takes minutes; scripts/test --long, or ninja check_alone"
  exit 77
fi
exec "$1" --build "$2" --target check_alone --parallel "$(nproc)"
