#!/usr/bin/env bash
# The tests with a real engine, in the long tier. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "${SPECTRUMKV_LONG:-}" != 1 ]; then
  echo "SKIPPED: vLLM: takes many minutes and installs 3 GB; scripts/test --long runs it"
  exit 77
fi
for program in gcc readelf; do
  command -v "$program" > /dev/null || { echo "SKIPPED: vLLM cannot be installed: no $program"; exit 77; }
done
[ "$(uname -m)" = x86_64 ] || { echo "SKIPPED: vLLM cannot be installed: its wheel for CPUs is for x86-64"; exit 77; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "SKIPPED: vLLM cannot be installed: it needs Python 3.11"; exit 77; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! told=$(tests/engine/install.sh 2> "$log"); then
  cat "$log"
  echo "SKIPPED: vLLM cannot be installed: $(tail -1 "$log")"
  exit 77
fi
mapfile -t told <<< "$told"
export SPECTRUMKV_ENGINE_PYTHON=${told[0]} SPECTRUMKV_ENGINE_MODEL=${told[1]}
tests/languages/python/run.sh -s -rs tests/engine "$@"
