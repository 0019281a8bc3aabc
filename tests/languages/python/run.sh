#!/usr/bin/env bash
# Runs the Python tests in the environment that scripts/install-deps makes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../../.."
if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pytest, spectrumkv' 2>/dev/null; then
  echo "SKIPPED: no Python environment; scripts/install-deps makes one"
  exit 77
fi
exec .venv/bin/python -m pytest -q -p no:cacheprovider "$@"
