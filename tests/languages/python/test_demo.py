"""The demo program against real daemons. SPECTRUMKVD names the program to run."""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEMO = ROOT / "client" / "examples" / "python" / "demo"
PROGRAM = os.environ.get("SPECTRUMKVD", "")

pytestmark = pytest.mark.skipif(not PROGRAM, reason="SKIPPED: SPECTRUMKVD is not set")


def run_demo(tmp_path, *arguments, program=PROGRAM, **environment):
    return subprocess.run(
        [sys.executable, DEMO, "--daemon", program, "--rounds", "1", *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path), **environment}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip


def test_every_check_holds_and_nothing_is_left(tmp_path):
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every check held" in done.stdout
    assert done.stdout.count("bit-exact") >= 11 and "WRONG" not in done.stdout
    assert re.search(r"spectrumkv_wire_bytes_total\{role=\"sender\"\} [1-9]", done.stdout)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [{"arguments": ["--corrupt"]}, {"environment": {"SPECTRUMKV_DEMO_CORRUPT": "1"}}])
def test_one_wrong_bit_in_the_destination_fails_it(tmp_path, how):
    done = run_demo(tmp_path, *how.get("arguments", []), **how.get("environment", {}))
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == 2  # its line and the last one
    assert re.search(r"1 of \d+ values differ", done.stdout)


def test_kept_daemons_run_on_and_can_be_stopped(tmp_path):
    done = run_demo(tmp_path, "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    command = re.search(r"^  (kill (\d+) (\d+); rm -rf \S+)$", done.stdout, re.MULTILINE)
    assert command
    pids = [int(command[2]), int(command[3])]
    try:
        for pid in pids:
            os.kill(pid, 0)
    finally:
        subprocess.run(command[1], shell=True, check=True)
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "the command did not stop the daemons"
        time.sleep(0.1)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_daemon_that_does_not_start_is_explained(tmp_path):
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    program.chmod(0o755)
    done = run_demo(tmp_path, program=str(program))
    assert done.returncode == 1
    assert "ended with 3" in done.stderr and "no such luck" in done.stderr
    assert list(tmp_path.iterdir()) == [program]
