import os

# A daemon is started by fork and exec; gRPC's own preparations for forks can abort the child before the exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import pytest
from fake_daemon import FakeDaemon

import spectrumkv as skv


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path / "worker.sock")
    yield fake
    fake.stop()


@pytest.fixture
def client(daemon):
    with skv.Client(daemon.path, timeout_s=5) as connected:
        yield connected


@pytest.fixture
def group():
    return skv.Group(layers=[2, 5], heads=3, head_dim=16, block_tokens=4, num_blocks=7)
