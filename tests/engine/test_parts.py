"""The connector's parts that need PyTorch, by the engine's interpreter."""

import json
import os
import pathlib
import subprocess

import servers

import spectrumkv as skv


def test_parts():
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(skv.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([servers.PYTHON, pathlib.Path(__file__).with_name("check_parts.py")], env=environment, capture_output=True,
                          text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["run"] >= 10, done.stdout
