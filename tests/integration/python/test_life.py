"""Lives of transfers, pools and daemons: order of calls, layer-wise sources, cancel, death, leases, drain, restart."""

import contextlib
import pathlib
import queue
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from moves import check, expected_of, fill, make_side, move, poison, random_words, scattered, small_group, tier_ids, unique
from real_daemon import refused, running

import spectrumkv as skv
from spectrumkv.errors import rpc
from spectrumkv.v1 import admin_service_pb2, report_pb2, schema_pb2, worker_service_pb2

TOKENS = 10
RAW = dict(allocator="RAW", budget=1.1)
WAITING, COMMITTED = report_pb2.TRANSFER_STATE_WAITING, report_pb2.TRANSFER_STATE_COMMITTED
CANCELLED, EXPIRED = report_pb2.TRANSFER_STATE_CANCELLED, report_pb2.TRANSFER_STATE_EXPIRED


class Ends:
    """Both ends of one transfer, and its calls with everything filled in."""

    def __init__(self, source, target, prefill, decode, name, group=None, tokens=TOKENS):
        self.source, self.target, self.prefill, self.decode = source, target, prefill, decode
        self.name, self.tokens = name, tokens
        group = group or small_group()
        rng = np.random.default_rng(31)
        self.kv = random_words(rng, (len(group.layers), 2, tokens, group.heads, group.head_dim), group.dtype)
        self.here = make_side(source, prefill, [group], {0: scattered(rng, group, tokens)})
        self.there = make_side(target, decode, [group], {0: scattered(rng, group, tokens)})
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


@pytest.fixture
def ends(source, target, prefill, decode, transfer_id):
    both = Ends(source, target, prefill, decode, transfer_id)
    with both.here.pool, both.there.pool:
        yield both


ORDERS = [("expect", "send"), ("send", "expect"), ("publish", "fetch"), ("fetch", "publish")]


@pytest.mark.parametrize("pause_s", [0, 0.3])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_either_half_may_come_first(order, pause_s, ends):
    getattr(ends, order[0])()
    time.sleep(pause_s)
    getattr(ends, order[1])()
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def layer_wise(ends, layers, policy, pull):
    """Writes layer l only once the destination has layer l - 1."""
    words = ends.here.pool.kv()
    kv = words.copy()
    words[:] = 0
    ready = threading.Semaphore(0)
    seen = []

    def on_layers(count):
        seen.append(count)
        ready.release()

    start = (ends.publish, ends.fetch) if pull else (ends.send, ends.expect)
    start[0](layerwise=True, policy=policy)
    start[1]()
    reports = []
    watcher = threading.Thread(
        target=lambda: reports.append(ends.target.wait(ends.name, timeout_s=60, on_layers_ready=on_layers)))  # fmt: skip
    watcher.start()
    for layer in range(layers):
        words[layer] = kv[layer]
        ends.source.advance(ends.name, layers=layer + 1, tokens=ends.tokens)
        assert ready.acquire(timeout=30), f"layer {layer} was never ready"
    watcher.join(30)
    assert reports and reports[0].state == COMMITTED
    assert seen == list(range(1, layers + 1))
    return reports[0]


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("policy", ["raw", "greedy", "optimal"])
def test_layer_wise_source(policy, pull, source, target, prefill, decode, transfer_id):
    group = small_group(layers=range(6), head_dim=64, num_blocks=40)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=70)
    with ends.here.pool, ends.there.pool:
        greedy = skv.policy(allocator="GREEDY", budget=0.6, importance="POSITION", tiers=["RAW", "P8", "P4"])
        optimal = skv.policy(allocator="OPTIMAL", budget=0.6)
        report = layer_wise(ends, 6, {"raw": skv.policy(**RAW), "greedy": greedy, "optimal": optimal}[policy], pull)
        if policy == "raw":
            check(ends.there, [ends.kv])
        else:
            assert report.wire_bytes <= 0.6 * report.kv_bytes
            assert report.layers_ready == 6


def test_optimal_sends_what_it_planned(source, target, prefill, decode, transfer_id):
    """The dry run says the bytes that travel; a larger budget never has a larger error."""
    group = small_group(layers=range(4), heads=3, head_dim=64, num_blocks=60)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=200)
    exact = ends.kv.view(np.float16).astype(np.float64)
    with ends.here.pool, ends.there.pool:
        before = np.inf
        for budget in (0.2, 0.3, 0.5):
            policy = skv.policy(allocator="OPTIMAL", budget=budget)
            plan = source.plan(ends.here.pool, 200, ends.here.blocks[0], policy)
            name = f"{transfer_id}-{budget}"
            target.expect(name, pool=ends.there.pool, token_count=200, blocks=ends.there.blocks[0])
            source.send(name, peer=decode.peer, pool=ends.here.pool, token_count=200,
                        blocks=ends.here.blocks[0], policy=policy)  # fmt: skip
            report = target.wait(name, timeout_s=60)
            assert report.wire_bytes == plan.wire_bytes <= budget * report.kv_bytes
            assert report.wire_bytes > 0.98 * budget * report.kv_bytes
            landed = ends.there.pool.read_tokens(200, ends.there.blocks[0]).astype(np.float64)
            error = ((landed - exact) ** 2).sum()
            assert 0 < error < before
            before = error


def test_chunked_prefill_advances_by_tokens(source, target, prefill, decode, transfer_id):
    """Rectangles of layers and tokens, in any order; the union counts."""
    group = small_group(layers=range(3), heads=8, head_dim=128, block_tokens=64, num_blocks=12)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=600)
    with ends.here.pool, ends.there.pool:
        ends.expect()
        ends.send(layerwise=True)
        for layers, tokens in ((3, 100), (1, 600), (3, 300), (2, 600), (1, 5)):
            source.advance(ends.name, layers=layers, tokens=tokens)
        time.sleep(0.2)
        assert target.get_transfer(ends.name).layers_ready <= 2
        source.advance(ends.name, layers=3, tokens=600)
        ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])
        with refused("FAILED_PRECONDITION", "TRANSFER_TERMINAL"):
            source.advance(ends.name, layers=3, tokens=600)


def test_advance_that_is_wrong(ends):
    ends.send(layerwise=True)
    for layers, tokens in ((3, TOKENS), (1, TOKENS + 1)):
        with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
            ends.source.advance(ends.name, layers=layers, tokens=tokens)
    with refused("INVALID_ARGUMENT", "INVALID_SCORES"):
        ends.source.advance(ends.name, layers=1, tokens=TOKENS, scores=[1.0] * (TOKENS - 1))
    ends.source.cancel(ends.name)


@pytest.mark.parametrize("by", ["source", "target"])
@pytest.mark.parametrize("phase", ["alone", "joined", "half_way", "committed"])
def test_cancel(phase, by, ends):
    client = getattr(ends, by)
    if phase == "alone":
        ends.send() if by == "source" else ends.expect()
        report = client.cancel(ends.name)
        assert report.state == CANCELLED and report.reason == "CANCELLED"
        # The other half, coming late, learns it at once.
        ends.expect() if by == "source" else ends.send()
        other = ends.target if by == "source" else ends.source
        if by == "source":  # the dialler is gone; nobody will dial again
            other.cancel(ends.name)
        assert ended(other, ends.name).state == CANCELLED
        assert ends.untouched()
        return
    ends.expect()
    ends.send(layerwise=phase != "committed")
    if phase == "committed":
        ends.both_end(COMMITTED)
        assert client.cancel(ends.name).state == COMMITTED
        check(ends.there, [ends.kv])
        return
    if phase == "half_way":
        ends.source.advance(ends.name, layers=1, tokens=TOKENS)
        until(lambda: ends.target.get_transfer(ends.name).layers_ready == 1)
    else:
        until(lambda: ends.source.get_transfer(ends.name).state != WAITING)
    assert client.cancel(ends.name).state == CANCELLED
    landed = ends.there.pool.segment.memory.copy()
    ends.both_end(CANCELLED)
    # No byte lands late, whatever the source does now.
    with refused("FAILED_PRECONDITION", "TRANSFER_TERMINAL"):
        ends.source.advance(ends.name, layers=2, tokens=TOKENS)
    time.sleep(0.2)
    if by == "target":
        assert (ends.there.pool.segment.memory == landed).all()
    # The blocks are free again on both sides.
    ends.name += ".again"
    poison(ends.there)
    ends.expect()
    ends.send()
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def test_published_and_released(ends):
    ends.publish()
    ends.source.release(ends.name)
    assert ended(ends.source, ends.name).state == CANCELLED
    ends.fetch(deadline_ms=5000)
    assert ended(ends.target, ends.name).state != COMMITTED
    assert ends.untouched()


def test_released_transfers_are_forgotten(ends):
    ends.expect()
    with refused("FAILED_PRECONDITION", "TRANSFER_ACTIVE"):
        ends.target.release(ends.name)
    ends.send()
    ends.both_end(COMMITTED)
    ends.source.release(ends.name)
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        ends.source.get_transfer(ends.name)


def test_deadline(ends):
    ends.expect(deadline_ms=200)
    report = ended(ends.target, ends.name)
    assert report.state == EXPIRED and report.reason == "DEADLINE_EXCEEDED"
    ends.name += ".send"
    ends.send(deadline_ms=200)
    report = ended(ends.source, ends.name)
    assert report.state == EXPIRED and report.reason == "DEADLINE_EXCEEDED"
    assert ends.untouched()


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_transfer_token(pull, ends):
    right, wrong = b"0123456789abcdef", b"0123456789abcdeF"
    acceptor, dialler = (ends.publish, ends.fetch) if pull else (ends.expect, ends.send)
    for number, token in enumerate((wrong, b"")):
        ends.name = f"{ends.name}.{number}"
        acceptor(token=right)
        dialler(token=token)
        report = ended(ends.target if pull else ends.source, ends.name)
        assert (report.code, report.reason) == (7, "TOKEN_MISMATCH"), report  # PERMISSION_DENIED
        waiting = ends.source if pull else ends.target
        assert waiting.get_transfer(ends.name).state == WAITING
        waiting.cancel(ends.name)
    assert ends.untouched()
    ends.name += ".right"
    acceptor(token=right)
    dialler(token=right)
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def test_dropped_tokens_leave_no_hole(source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(37)
    tokens = 60
    here_group = small_group(head_dim=64, num_blocks=30)
    there_group = small_group(head_dim=64, num_blocks=20, block_tokens=8, layout="HND")
    kv = random_words(rng, (2, 2, tokens, 2, 64), "float16")
    here = make_side(source, prefill, [here_group], {0: scattered(rng, here_group, tokens)})
    there = make_side(target, decode, [there_group], {0: scattered(rng, there_group, tokens)})
    policy = skv.policy(allocator="PDTRIM", budget=0.4, tiers=["RAW", "Q8", "Q4", "DROP"], scores=rng.random(tokens))
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        plan = source.plan(here.pool, tokens, here.blocks, policy)
        dropped = [t for run in plan.dropped_tokens for t in range(run.first, run.first + run.count)]
        kept = [t for t in range(tokens) if t not in dropped]
        assert dropped and kept and len(plan.token_tiers_k) == len(kept)
        expected, wire_bytes = expected_of([np.ascontiguousarray(kv[:, :, kept])], [here_group], [there_group],
                                           tier_ids(plan.token_tiers_k), tier_ids(plan.token_tiers_v))  # fmt: skip
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy,
                              accept_dropped=True)  # fmt: skip
        check(there, expected)
        for report in (sent, received):
            runs = [(run.first, run.count) for run in report.dropped_tokens]
            assert runs == [(run.first, run.count) for run in plan.dropped_tokens]
            assert report.kept_tokens == len(kept) and report.wire_bytes == wire_bytes
        with pytest.raises(skv.TransferFailed) as failed:
            move(transfer_id + "b", source, target, prefill, decode, here, there, tokens, policy=policy)
        assert (failed.value.code, failed.value.reason) == ("FAILED_PRECONDITION", "DROP_NOT_ACCEPTED")


# A worker of its own process: DAEMON ROLE TRANSFER PEER PHASE. Its words are 1000 * layer + token.
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
elif peer:
    client.send(name, peer=peer, **source)
else:
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


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("phase", ["nothing", "half"])
def test_worker_that_dies(phase, role, source, target, prefill, decode, transfer_id):
    """What a killed worker held is let go long before its lease ends, and its peer hears of it: before a layer was
    sent, and between two layers."""
    daemon = prefill if role == "source" else decode
    ends = Ends(source, target, prefill, decode, transfer_id)
    layers = 1 if phase == "half" else 0
    with ends.here.pool, ends.there.pool:
        with worker_process(daemon, role, ends.name, decode.peer, phase) as (worker, pool_id):
            if role == "source":
                ends.expect()
            else:
                ends.send(layerwise=True)
                if layers:
                    ends.source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: source.get_transfer(ends.name).state != WAITING)
            until(lambda: target.get_transfer(ends.name).layers_ready == layers)
            worker.kill()
            worker.wait()
            died = time.monotonic()
            reasons = {"source": "SOURCE_GONE", "target": "DESTINATION_GONE"}
            for client in (source, target):
                report = ended(client, ends.name)
                assert (report.code, report.reason) == (9, reasons[role]), report  # FAILED_PRECONDITION
                assert report.layers_ready <= layers
            assert time.monotonic() - died < 15
            until(lambda: pool_id not in pools_of(daemon))
        if role == "source":
            landed = ends.there.pool.segment.memory.copy()
            time.sleep(0.2)
            assert (ends.there.pool.segment.memory == landed).all(), "a byte landed late"
            assert ends.untouched() == (layers == 0)
            poison(ends.there)
        ends.name += ".again"
        ends.expect()
        ends.send()
        ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])


@pytest.mark.parametrize("phase", ["final", "advanced"])
def test_worker_that_dies_after_its_last_word(phase, source, target, prefill, decode, transfer_id):
    """A source that was fully written may finish: its memory stays mapped until the transfer has ended."""
    ends = Ends(source, target, prefill, decode, transfer_id)
    words = np.empty((2, 2, TOKENS, 2, 16), "<u2")
    words[:] = 1000 * np.arange(2).reshape(2, 1, 1, 1, 1) + np.arange(TOKENS).reshape(1, 1, TOKENS, 1, 1)
    with ends.here.pool, ends.there.pool:
        with worker_process(prefill, "source", ends.name, "", phase) as (worker, pool_id):
            worker.kill()
            worker.wait()
            until(lambda: pools_of(prefill)[pool_id] == "lost")
            with refused("NOT_FOUND", "UNKNOWN_POOL"):  # nobody begins anything new with it
                ref = schema_pb2.PoolRef(pool_id=pool_id, epoch=prefill.epoch)
                rpc(source.worker.RenewLease, worker_service_pb2.RenewLeaseRequest(pool=ref), 20)
            ends.fetch()
            ends.both_end(COMMITTED)
            check(ends.there, [words])
            until(lambda: pool_id not in pools_of(prefill))


def owned_schema():
    schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[small_group().to_proto(0, 0)])
    schema.segments.add().daemon_owned.size_bytes = 1 << 16
    return schema


def test_lease(source, prefill):
    before = prefill.metrics()['spectrumkv_leases_expired_total{kind="pool"}']
    request = worker_service_pb2.RegisterPoolRequest(request_id=unique("r"), schema=owned_schema(), lease_ttl_ms=1000)
    answer = rpc(source.worker.RegisterPool, request, 20)
    assert answer.lease_ttl_ms == 1000
    renew = worker_service_pb2.RenewLeaseRequest(pool=answer.pool)
    for _ in range(4):  # longer than the lease
        time.sleep(0.4)
        assert rpc(source.worker.RenewLease, renew, 20).lease_ttl_ms == 1000
    until(lambda: prefill.metrics()['spectrumkv_leases_expired_total{kind="pool"}'] == before + 1)
    with refused("NOT_FOUND", "UNKNOWN_POOL"):
        rpc(source.worker.RenewLease, renew, 20)


def test_unregister_waits(ends, transfer_id):
    ends.expect()
    with refused("DEADLINE_EXCEEDED", "POOL_BUSY"):
        ends.there.pool.close(timeout_ms=200)
    ends.send(layerwise=True)  # the pool is as it was
    until(lambda: ends.target.get_transfer(ends.name).state != WAITING)
    closed = []
    closer = threading.Thread(target=lambda: closed.append(ends.there.pool.close(timeout_ms=20000)))
    closer.start()
    time.sleep(0.3)
    assert not closed
    with refused("FAILED_PRECONDITION", "POOL_CLOSING"):
        ends.target.expect(transfer_id + ".late", pool=ends.there.pool, token_count=1, blocks=[11])
    ends.source.advance(ends.name, layers=2, tokens=TOKENS)
    ends.both_end(COMMITTED)
    closer.join(20)
    assert closed == [None]
    check(ends.there, [ends.kv])


def test_drain_waits_for_holds(target, decode, transfer_id):
    with running() as draining, draining.client() as source, draining.admin() as admin:
        ends = Ends(source, target, draining, decode, transfer_id)
        with ends.here.pool, ends.there.pool:
            ends.publish()
            with refused("DEADLINE_EXCEEDED", "DRAIN_TIMEOUT"):
                admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=300), timeout=20)
            assert draining.metrics()["spectrumkv_draining"] == 1
            with refused("UNAVAILABLE", "DRAINING"):
                ends.source.publish(transfer_id + "b", **ends._here())
            with refused("UNAVAILABLE", "DRAINING"):
                make_side(source, draining, [small_group()], {0: [1]})
            ends.fetch()  # what was promised is kept
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])
            done = admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=5000), timeout=20)
            assert done.transfers_left == 0
        assert draining.stop() == 0


class HoldStream:
    """A HoldPool stream by hand: ping() asks, messages has the answers, `ended` is set at its end."""

    def __init__(self, client, ref):
        self.messages, self.ended, self.error = [], threading.Event(), None
        self._pings = queue.Queue()
        self._ref = ref
        self._stream = client.worker.HoldPool(iter(self._pings.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        self.ping()

    def ping(self):
        self._pings.put(worker_service_pb2.HoldPoolRequest(pool=self._ref))

    def close(self):
        self._pings.put(None)

    def events(self):
        return [message.event for message in self.messages if message.event]

    def _read(self):
        try:
            for message in self._stream:
                self.messages.append(message)
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()


def test_a_pool_stays_while_the_daemon_drains():
    """DRAINING is no end: pings renew, blocks are read and written, and the last event is another one."""
    with running() as daemon, daemon.client() as client, daemon.admin() as admin:
        request = worker_service_pb2.RegisterPoolRequest(request_id="r", schema=owned_schema(), lease_ttl_ms=1000)
        ref = rpc(client.worker.RegisterPool, request, 20).pool
        stream = HoldStream(client, ref)
        until(lambda: stream.messages)
        admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=20000), timeout=30)  # nothing to wait for
        until(lambda: stream.events() == ["DRAINING"])
        answers = len(stream.messages)
        for _ in range(4):  # longer than the lease
            time.sleep(0.4)
            stream.ping()
        until(lambda: len(stream.messages) > answers)
        late = HoldStream(client, ref)  # a worker that connects again hears it, too
        until(lambda: late.events() == ["DRAINING"])
        assert rpc(client.worker.RenewLease, worker_service_pb2.RenewLeaseRequest(pool=ref), 20).lease_ttl_ms == 1000
        blocks = worker_service_pb2.GetBlocksRequest(pool=ref, runs=[schema_pb2.BlockRun(count=1)])
        assert sum(len(answer.blocks) for answer in client.worker.GetBlocks(blocks, timeout=20)) == 4  # 2 layers, K and V
        assert not stream.ended.is_set() and not late.ended.is_set()
        rpc(client.worker.UnregisterPool, worker_service_pb2.UnregisterPoolRequest(pool=ref), 20)
        for held in (stream, late):
            assert held.ended.wait(20) and held.error is None
            assert held.events() == ["DRAINING", "UNREGISTERED"]


def test_restart_of_the_daemon(target, decode, transfer_id):
    with running() as prefill, prefill.client() as source:
        ends = Ends(source, target, prefill, decode, transfer_id)
        with ends.here.pool, ends.there.pool:
            stale = ends.here.pool.ref
            ends.publish()
            prefill.restart()
            assert prefill.epoch != stale.epoch
            request = worker_service_pb2.RenewLeaseRequest(pool=stale)
            until(lambda: _code(source, request) == ("FAILED_PRECONDITION", "STALE_EPOCH"))
            # The client registers again by itself; what was published is gone with the daemon.
            with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
                source.get_transfer(ends.name)
            ends.publish()
            assert ends.here.pool.registrations == 2 and ends.here.pool.ref.epoch == prefill.epoch
            ends.fetch()
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])


def _code(client, request):
    try:
        rpc(client.worker.RenewLease, request, 5)
    except skv.SpectrumKVError as error:
        return error.code, error.reason


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_daemon_that_restarts_in_the_middle(pull, source, target, prefill, decode, transfer_id):
    """The one that dialled comes back, and is told at once that there is nothing to go on with: the other half of the
    transfer went with the daemon that had it."""
    with running() as mortal, mortal.client() as its:
        ends = Ends(its, target, mortal, decode, transfer_id) if pull else Ends(source, its, prefill, mortal, transfer_id)
        with ends.here.pool, ends.there.pool:
            (ends.publish if pull else ends.send)(layerwise=True)
            (ends.fetch if pull else ends.expect)()
            ends.source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: ends.target.get_transfer(ends.name).layers_ready == 1)
            dialler = target if pull else source
            mortal.restart()
            start = time.monotonic()
            report = ended(dialler, ends.name)
            assert (report.code, report.reason) == (9, "PEER_RESTARTED"), report  # FAILED_PRECONDITION
            assert time.monotonic() - start < 4
            assert report.attempts > 1
            # Its blocks are free for the next one.
            ends.name += ".again"
            (ends.publish if pull else ends.expect)()
            (ends.fetch if pull else ends.send)()
            ends.both_end(COMMITTED)
            check(ends.there, [ends.kv])


def test_daemon_that_dies_in_the_middle(target, decode, transfer_id):
    with running() as prefill, prefill.client() as source:
        ends = Ends(source, target, prefill, decode, transfer_id)
        with ends.there.pool:
            ends.expect()
            ends.send(layerwise=True)
            source.advance(ends.name, layers=1, tokens=TOKENS)
            until(lambda: target.get_transfer(ends.name).layers_ready == 1)
            prefill.kill()
            report = ended(target, ends.name)
            assert (report.code, report.reason) == (14, "PEER_GONE"), report  # UNAVAILABLE
        ends.here.pool.close()
