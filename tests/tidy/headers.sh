#!/usr/bin/env bash
# headers.sh CMAKE BUILD_DIR: every header compiles alone; a fifth of the time of the whole build, so in the long tier.
# scripts/test --long has built the target already.
set -euo pipefail
if [ -z "${SPECTRUMKV_LONG:-}" ]; then
  echo "SKIPPED: headers compile alone: takes minutes; scripts/test --long, or ninja check_headers"
  exit 77
fi
exec "$1" --build "$2" --target check_headers --parallel "$(nproc)"
