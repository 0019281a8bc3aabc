#!/usr/bin/env bash
# scripts/quality as a test of the long tier. Arguments go to it.
set -euo pipefail
if [ "${SPECTRUMKV_LONG:-}" != 1 ]; then
  echo "SKIPPED: quality of the real model: takes minutes and installs a model; scripts/test --long runs it"
  exit 77
fi
exec "$(dirname "$0")/../../scripts/quality" "$@"
