import os

# A daemon is started by fork and exec; gRPC's own preparations for forks can abort the child before the exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import itertools

import pytest
from ends import Ends
from moves import serves_the_next
from real_daemon import PROGRAM, RealDaemon
from small_sides import small_sides

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items):
    if not PROGRAM:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="SKIPPED: SPECTRUMKVD, the program to test, is not set"))


def _daemon():
    daemon = RealDaemon()
    yield daemon
    code = daemon.stop()
    log = daemon.log()
    daemon.remove()
    assert code == 0, log


@pytest.fixture(scope="session")
def prefill():
    """The daemon beside the sending worker."""
    yield from _daemon()


@pytest.fixture(scope="session")
def decode():
    """The daemon beside the receiving worker."""
    yield from _daemon()


@pytest.fixture
def source(prefill):
    """A client of the prefill daemon."""
    with prefill.client() as client:
        yield client


@pytest.fixture
def target(decode):
    """A client of the decode daemon."""
    with decode.client() as client:
        yield client


@pytest.fixture
def transfer_id(request):
    return f"{request.node.originalname[:60]}-{next(_numbers)}"


@pytest.fixture
def ends(source, target, prefill, decode, transfer_id):
    both = Ends(source, target, prefill, decode, transfer_id)
    with both.here.pool, both.there.pool:
        yield both


@pytest.fixture(autouse=True)
def daemons_survive(prefill, decode):
    """Whatever a test does, the two daemons live on."""
    yield
    for daemon in (prefill, decode):
        assert daemon.alive, daemon.log()


@pytest.fixture
def counted(prefill):
    """Something in the test must move errors_total of the prefill daemon."""
    before = prefill.errors()
    yield
    assert prefill.errors() > before


@pytest.fixture
def next_is_served(source, target, prefill, decode, transfer_id):
    """Whatever the test does, the next transfer is served."""
    yield
    serves_the_next(transfer_id, source, target, prefill, decode)


@pytest.fixture
def sides(source, target, prefill, decode):
    """Two small pools that fit each other; the first is filled."""
    with small_sides(source, target, prefill, decode) as both:
        yield both
