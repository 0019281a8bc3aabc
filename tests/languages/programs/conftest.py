import os

# A daemon is started by fork and exec; gRPC's own preparations for forks can abort the child before the exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "client" / "examples"
sys.path.insert(0, str(ROOT / "tests" / "integration" / "python"))

from real_daemon import PROGRAM, running  # noqa: E402


def pytest_collection_modifyitems(items):
    if not PROGRAM:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="SKIPPED: SPECTRUMKVD, the program to test, is not set"))


@pytest.fixture(scope="session")
def daemons():
    """(prefill, decode), with worker services on TCP too, for languages without Unix sockets."""
    tcp = {"worker.tcp_address": "127.0.0.1:0"}
    with running(**tcp) as prefill, running(**tcp) as decode:
        yield prefill, decode


def need(language, *programs, files=()):
    """Skips, visibly, where a language's tools are not installed."""
    missing = [name for name in programs if shutil.which(name) is None]
    missing += [str(file) for file in files if not pathlib.Path(file).exists()]
    if missing:
        reason = f"{language}: no {', '.join(missing)}; scripts/install-deps --languages installs what it needs"
        pytest.skip("SKIPPED: " + reason)


def run(command, timeout_s=240, **options):
    """Runs to the end; the finished process, its output for the message where it failed."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout_s, **options)


def build(command, timeout_s=300, **options):
    done = run(command, timeout_s, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def generated(language):
    """Where a language's generated code and its program go: kept between runs, below the build folder."""
    folder = pathlib.Path(os.environ["SPECTRUMKV_GENERATED"]) / language
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_round_trip(command, daemons, **options):
    """The program moves a cache exactly, says what the daemon refuses by its reason, and leaves nothing behind."""
    done = run(command, **options)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said + daemons[0].log() + daemons[1].log()
    assert "every value arrived" in done.stdout, said
    assert "refused: NOT_FOUND UNKNOWN_TRANSFER transfer_id=nobody" in done.stdout.replace("\n", " "), said
    for daemon in daemons:
        assert daemon.metrics()["spectrumkv_inflight_transfers"] == 0
        assert no_pools(daemon), "the program left its pool registered"


def no_pools(daemon):
    from spectrumkv.v1 import admin_service_pb2

    with daemon.admin() as admin:
        return not admin.ListPools(admin_service_pb2.ListPoolsRequest()).pools
