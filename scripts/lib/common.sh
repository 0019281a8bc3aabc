# shellcheck shell=bash
# For the scripts beside this folder: source it after `set -euo pipefail`.

# What is compiled for the first time is not preprocessed twice; the names of its headers come from the compiler.
export CCACHE_DEPEND=${CCACHE_DEPEND:-1}

# say WORDS: one line of progress, with the seconds since the script began.
say() { printf '\n== [%4ds] %s\n' "$SECONDS" "$*"; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# Compile jobs: one per core, but no more than the free memory carries (gRPC's headers take about 1 GiB a job).
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ {print int($2 / 1300000)}' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# build_preset PRESET [TARGET...]: configures and builds with visible progress.
build_preset() {
  local preset=$1 log
  shift
  log=$(mktemp)
  if ! cmake --preset "$preset" > "$log" 2>&1; then
    cat "$log"
    rm -f "$log"
    fail "cmake --preset $preset failed"
  fi
  grep '^-- CUDA' "$log" || true
  rm -f "$log"
  NINJA_STATUS='[%f/%t %es] ' cmake --build --preset "$preset" --parallel "$(build_jobs)" --target "${@:-all}"
}
