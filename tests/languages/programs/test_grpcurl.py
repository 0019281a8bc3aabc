"""The walk-through with grpcurl works as it is printed."""

import os
import pathlib
import re
import shutil
import sys

import pytest
from conftest import EXAMPLES, need, no_pools, run

WALK = (EXAMPLES / "grpcurl" / "README.md").read_text()
TOOLS = pathlib.Path(__file__).parent / "tools"


def script(daemons):
    """Every command of the page, with the first block's addresses exchanged for those of our daemons."""
    first, *rest = re.findall(r"^```bash\n(.*?)^```$", WALK, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(\w+)=", first, re.MULTILINE) == ["PREFILL", "DECODE", "PEER"]
    prefill, decode = daemons
    return "\n".join(["set -euo pipefail", f"PREFILL={prefill.worker} DECODE={decode.worker} PEER={decode.peer}", *rest])


def walk(daemons, path):
    done = run(["bash", "-c", script(daemons)], env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spectrumkv.v1.WorkerService\n" in done.stdout and "WatchTransfer" in done.stdout
    assert re.search(r"^TRANSFER_STATE_COMMITTED: \d+ bytes on the wire$", done.stdout, re.MULTILINE)
    assert "every value arrived" in done.stdout
    assert "UNKNOWN_TRANSFER" in done.stderr
    assert all(no_pools(daemon) for daemon in daemons)


def test_the_walk_through_over_reflection(daemons, tmp_path):
    """grpcurl played by a program that has only what reflection tells."""
    need("the walk-through", "jq")
    stand_in = tmp_path / "grpcurl"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TOOLS}/grpcurl.py" "$@"\n')
    stand_in.chmod(0o755)
    walk(daemons, f"{tmp_path}:{os.environ['PATH']}")


def test_the_walk_through_with_grpcurl_itself(daemons):
    if shutil.which("grpcurl") is None:
        pytest.skip("SKIPPED: grpcurl is not installed, and Debian has no package of it")
    need("the walk-through", "jq")
    walk(daemons, os.environ["PATH"])
