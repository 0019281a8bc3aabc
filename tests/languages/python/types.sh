#!/usr/bin/env bash
# The Python client passes mypy in strict mode.
set -euo pipefail
cd "$(dirname "$0")/../../../client/python"
if ! [ -x ../../.venv/bin/mypy ]; then
  echo "SKIPPED: no mypy; scripts/install-deps installs it"
  exit 77
fi
exec ../../.venv/bin/mypy --cache-dir=/dev/null
