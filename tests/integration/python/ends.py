"""Both ends of one transfer, and workers that may be killed."""

import contextlib
import pathlib
import subprocess
import sys
import time

import numpy as np
from moves import fill, make_side, poison, random_words, scattered, small_group

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2, report_pb2, schema_pb2

TOKENS = 10
RAW = dict(allocator="RAW", budget=1.1)
WAITING, COMMITTED = report_pb2.TRANSFER_STATE_WAITING, report_pb2.TRANSFER_STATE_COMMITTED
CANCELLED, EXPIRED = report_pb2.TRANSFER_STATE_CANCELLED, report_pb2.TRANSFER_STATE_EXPIRED


class Ends:
    """Both ends of one transfer, and its calls with everything filled in."""

    def __init__(self, source, target, prefill, decode, name, group=None, tokens=TOKENS, **pool_options):
        self.source, self.target, self.prefill, self.decode = source, target, prefill, decode
        self.name, self.tokens = name, tokens
        group = group or small_group()
        rng = np.random.default_rng(31)
        self.kv = random_words(rng, (len(group.layers), 2, tokens, group.heads, group.head_dim), group.dtype)
        self.here = make_side(source, prefill, [group], {0: scattered(rng, group, tokens)}, **pool_options)
        self.there = make_side(target, decode, [group], {0: scattered(rng, group, tokens)}, **pool_options)
        fill(self.here, [self.kv])
        poison(self.there)

    def _here(self, **options):
        return {**dict(pool=self.here.pool, token_count=self.tokens, blocks=self.here.blocks,
                       policy=skv.policy(**RAW)), **options}  # fmt: skip

    def _there(self, **options):
        return {**dict(pool=self.there.pool, token_count=self.tokens, blocks=self.there.blocks), **options}

    def send(self, **options):
        self.source.send(self.name, **{"peer": self.decode.peer, **self._here(**options)})

    def publish(self, **options):
        self.source.publish(self.name, **self._here(**options))

    def expect(self, **options):
        self.target.expect(self.name, **self._there(**options))

    def fetch(self, **options):
        self.target.fetch(self.name, **{"peer": self.prefill.peer, **self._there(**options)})

    def both_end(self, state, reason=None):
        """Both halves reach `state`; the sender's report."""
        for client in (self.target, self.source):
            report = ended(client, self.name)
            assert report.state == state, report
            assert reason is None or report.reason == reason, report
        return report

    def untouched(self):
        return bool((self.there.pool.segment.memory == 0xA5).all())


def ended(client, name):
    try:
        return client.wait(name, timeout_s=30)
    except skv.TransferFailed as failed:
        return failed.report


def until(what, timeout_s=15):
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


# A worker of its own process: DAEMON ROLE TRANSFER PEER PHASE. Role "idle" registers its pool and no more. Its words are 1000 * layer + token.
_WORKER = """
import sys, time
import numpy as np
import spectrumkv as skv
sys.path.insert(0, sys.argv[1])
from moves import small_group
_, _, daemon, role, name, peer, phase = sys.argv
client = skv.Client(daemon)
group = small_group()
pool = client.shared_memory_pool([group], model="m")
words = 1000 * np.arange(2).reshape(2, 1, 1, 1, 1) + np.arange(10).reshape(1, 1, 10, 1, 1)
pool.write_tokens(np.broadcast_to(words, (2, 2, 10, 2, 16)).astype("<u2").view("<f2"), [1, 2, 3])
common = dict(pool=pool, token_count=10, blocks=[1, 2, 3])
source = dict(policy=skv.policy(allocator="RAW", budget=1.1), layerwise=phase != "final", **common)
if role == "target":
    client.expect(name, **common)
elif role == "source" and peer:
    client.send(name, peer=peer, **source)
elif role == "source":
    client.publish(name, **source)
if role == "source" and phase in ("half", "advanced"):
    client.advance(name, layers=1 if phase == "half" else 2, tokens=10)
assert pool.wait_held()  # else the daemon would learn of this process's death by the end of the lease alone
print(pool.pool_id, flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def worker_process(daemon, role, name, peer, phase):
    """A worker in a process of its own; (process, pool_id). Killed at the end, where the block did not."""
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", _WORKER, here, daemon.worker, role, name, peer, phase]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield worker, worker.stdout.readline().strip()
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
        skv.sweep_stale_segments()  # the dead worker could not
        assert not list(pathlib.Path("/dev/shm").glob(f"spectrumkv-kv-{worker.pid}-*"))


def pools_of(daemon):
    with daemon.admin() as admin:
        return {pool.pool_id: pool.state for pool in admin.ListPools(admin_service_pb2.ListPoolsRequest()).pools}


def owned_schema():
    schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[small_group().to_proto(0, 0)])
    schema.segments.add().daemon_owned.size_bytes = 1 << 16
    return schema
