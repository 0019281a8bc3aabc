import os
import pathlib
import sys

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "integration/python"), str(_TESTS / "fault"), str(_TESTS.parent / "client/examples/python")]

import pytest  # noqa: E402
from pair import Pair  # noqa: E402


@pytest.fixture(scope="session")
def pair():
    """One prefill and one decode server, each beside its daemon, and a router before them."""
    made = Pair()
    try:
        yield made
    finally:
        made.close()
