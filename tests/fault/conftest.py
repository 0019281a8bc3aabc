import pathlib
import sys

# The launcher of real daemons and its helpers are those of the integration tests.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "integration" / "python"))

import os  # noqa: E402

# Processes are started by fork and exec; gRPC's own preparations for forks can abort the child before the exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import network  # noqa: E402
import pytest  # noqa: E402
from real_daemon import PROGRAM  # noqa: E402


def pytest_collection_modifyitems(items):
    if not PROGRAM:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="SKIPPED: SPECTRUMKVD, the program to test, is not set"))


@pytest.fixture(scope="session")
def surroundings():
    """(the test's own network or None, bytes of the small disks or 0, why something is missing or "")."""
    missing = network.why_not()
    if missing:
        yield None, 0, missing
        return
    network.own_mounts()
    net = network.Network()
    yield net, 24 << 20, ""
    net.close()
