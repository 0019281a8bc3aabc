"""200 transfers at once through a few staging slots: bounded memory, nobody starves, and who is turned away comes back."""

import functools
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from moves import fill, make_side, poison, random_words, small_group, unique
from real_daemon import SANITIZER_KIB, running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

RAW = dict(allocator="RAW", budget=1.1)
TRANSFERS, SLOTS, TOKENS, BLOCKS = 200, 4, 64, 4
# What a daemon may grow by: slots of both partitions (2 MiB each), and 64 KiB of state for each transfer.
GROWTH_KIB = 2 * SLOTS * 2048 + TRANSFERS * 64 + SANITIZER_KIB


def rss_kib(daemon):
    """Without the pages of pools, which count with whoever touches them."""
    told = pathlib.Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return int(next(line for line in told if line.startswith("RssAnon")).split()[1])


def test_200_transfers_and_4_slots():
    """Half of them fit at a time: the others are refused with a delay, and skv.retry honours it until all are through."""
    rng = np.random.default_rng(61)
    group = small_group(layers=range(4), heads=4, head_dim=64, block_tokens=16, num_blocks=BLOCKS * TRANSFERS)
    keys = dict(memory__send_slots=SLOTS, memory__receive_slots=SLOTS, transfer__max_active=TRANSFERS // 2)
    with running(**keys) as a, running(**keys) as b, a.client() as source, b.client() as target:
        blocks = [list(range(BLOCKS * i, BLOCKS * i + BLOCKS)) for i in range(TRANSFERS)]
        here = make_side(source, a, [group], {0: [block for part in blocks for block in part]})
        there = make_side(target, b, [group], here.blocks)
        kv = random_words(rng, (4, 2, TOKENS * TRANSFERS, 4, 64), "float16")
        with here.pool, there.pool:
            fill(here, [kv])
            poison(there)
            before, most, refusals, seconds = [rss_kib(a), rss_kib(b)], [0, 0], [], {}
            name, over, everyone = unique("many"), threading.Event(), threading.Barrier(TRANSFERS)

            def asked(call, *args, **options):
                try:
                    call(*args, **options)
                except skv.SpectrumKVError as error:
                    refusals.append(error)
                    raise

            def look():
                while not over.wait(0.02):
                    for side, daemon in enumerate((a, b)):
                        most[side] = max(most[side], rss_kib(daemon))

            def one(i):
                common = dict(token_count=TOKENS, blocks=blocks[i], deadline_ms=60000)
                patience = dict(attempts=1000, timeout_s=60)
                expect = functools.partial(asked, target.expect, f"{name}.{i}", pool=there.pool, **common)
                # None sends before every one has asked once, so half of them are refused however fast the others end.
                try:
                    expect()
                    refused = False
                except skv.SpectrumKVError:
                    refused = True
                everyone.wait(60)
                if refused:
                    skv.retry(expect, **patience)
                skv.retry(lambda: asked(source.send, f"{name}.{i}", peer=b.peer, pool=here.pool, policy=skv.policy(**RAW),
                                        **common), **patience)  # fmt: skip
                report = target.wait(f"{name}.{i}", timeout_s=60)
                seconds[i] = report.duration_seconds
                assert report.state == report_pb2.TRANSFER_STATE_COMMITTED

            watcher = threading.Thread(target=look)
            watcher.start()
            threads = [threading.Thread(target=one, args=(i,)) for i in range(TRANSFERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            over.set()
            watcher.join()
            assert len(seconds) == TRANSFERS, "some never ended"
            for i in range(TRANSFERS):
                words = there.pool.read_tokens(TOKENS, blocks[i]).view("<u2")
                assert (words == kv[:, :, TOKENS * i : TOKENS * i + TOKENS]).all(), i
            assert refusals and all(e.reason == "TRANSFERS_FULL" and e.retry_after_ms > 0 for e in refusals)
            median, slowest = statistics.median(seconds.values()), max(seconds.values())
            print(f"\n{TRANSFERS} transfers, {SLOTS} slots: {len(refusals)} refusals, slowest/median {slowest / median:.1f}"
                  f" ({slowest * 1e3:.0f}/{median * 1e3:.0f} ms); RSS grew by"
                  f" {most[0] - before[0]} and {most[1] - before[1]} KiB, bound {GROWTH_KIB}")  # fmt: skip
            for side in range(2):
                assert most[side] - before[side] < GROWTH_KIB
            for daemon in (a, b):
                assert daemon.metrics()["spectrumkv_inflight_transfers"] == 0


# How much slower transfers of another pair may be, beside those to a slow decode side; the cores are shared.
FACTOR, ROUNDS, SLOW = 10, 15, 8


class SlowLink:
    """The decode side takes 2 MB/s off the network."""

    def __init__(self, daemon):
        self._proxy = Proxy(daemon.peer, bytes_per_second=2e6)

    def __enter__(self):
        self.peer = self._proxy.__enter__().address
        return self

    def resume(self):
        pass

    def __exit__(self, *what):
        self._proxy.__exit__(*what)


class SlowDecode:
    """The decode daemon has three in a hundred of the time: reservations, decoding, commits and heartbeats are all slow."""

    def __init__(self, daemon):
        self.peer, self._daemon, self._over = daemon.peer, daemon, threading.Event()
        self._thread = threading.Thread(target=self._slow)

    def _slow(self):
        while not self._over.is_set():
            self._daemon.process.send_signal(signal.SIGSTOP)
            self._over.wait(0.1)
            self._daemon.process.send_signal(signal.SIGCONT)
            self._over.wait(0.003)

    def __enter__(self):
        self._thread.start()
        return self

    def resume(self):
        self._over.set()
        self._thread.join()

    def __exit__(self, *_):
        self.resume()


class StoppedDecode:
    """The decode daemon stands still for a while, less than the progress timeout, in the midst of its transfers."""

    def __init__(self, daemon):
        self.peer, self._daemon = daemon.peer, daemon

    def __enter__(self):
        return self

    def begun(self):
        self._daemon.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self._daemon.process.send_signal(signal.SIGCONT)

    def __exit__(self, *_):
        self.resume()


@pytest.mark.parametrize("kind", [SlowLink, SlowDecode, StoppedDecode])
def test_a_slow_decode_side_slows_its_own_transfers_only(kind):
    """Eight transfers to it are under way; those to another go on as before, and its own commit in the end."""
    rng = np.random.default_rng(67)
    group = small_group(layers=range(4), heads=4, head_dim=64, block_tokens=16, num_blocks=160)
    tokens, slow_tokens = 64, 256
    with running(memory__send_slots=16) as a, running() as fast, running() as slow:
        with a.client() as source, fast.client() as quick, slow.client() as lame:
            here = make_side(source, a, [group], {0: list(range(160))})
            there, far = (make_side(c, d, [group], {0: []}) for c, d in ((quick, fast), (lame, slow)))
            kv = random_words(rng, (4, 2, 16 * 160, 4, 64), "float16")
            with here.pool, there.pool, far.pool:
                fill(here, [kv])
                name = unique("pair")

                def quickly(tag):
                    took = []
                    for i in range(ROUNDS):
                        quick.expect(f"{name}.{tag}{i}", pool=there.pool, token_count=tokens, blocks=range(4))
                        source.send(f"{name}.{tag}{i}", peer=fast.peer, pool=here.pool, token_count=tokens, blocks=range(4),
                                    policy=skv.policy(**RAW))  # fmt: skip
                        took.append(quick.wait(f"{name}.{tag}{i}", timeout_s=30).duration_seconds)
                    return statistics.median(took)

                alone = quickly("alone")
                blocks = [range(16 * i, 16 * i + 16) for i in range(SLOW)]
                for i in range(SLOW):
                    lame.expect(f"{name}.slow{i}", pool=far.pool, token_count=slow_tokens, blocks=blocks[i])
                begin = time.monotonic()
                with kind(slow) as way:
                    for i in range(SLOW):
                        source.send(f"{name}.slow{i}", peer=way.peer, pool=here.pool, policy=skv.policy(**RAW),
                                    token_count=slow_tokens, blocks=blocks[i])  # fmt: skip
                        if i == SLOW // 2 and hasattr(way, "begun"):
                            way.begun()
                    beside = quickly("beside")
                    reports = [source.get_transfer(f"{name}.slow{i}") for i in range(SLOW)]
                    under_way = sum(report.state < report_pb2.TRANSFER_STATE_COMMITTED for report in reports)
                    seconds = time.monotonic() - begin
                    way.resume()
                    ends = [lame.wait(f"{name}.slow{i}", timeout_s=60).state for i in range(SLOW)]
                print(f"\nalone {alone * 1e3:.1f} ms, beside {kind.__name__} {beside * 1e3:.1f} ms: {beside / alone:.1f} times;"
                      f" {under_way} of {SLOW} slow ones under way after {seconds:.2f} s")  # fmt: skip
                assert under_way > 0, "the slow ones were too quick to show anything"
                assert beside < max(FACTOR * alone, 0.05)
                assert ends == SLOW * [report_pb2.TRANSFER_STATE_COMMITTED]
                for i in range(SLOW):
                    words = far.pool.read_tokens(slow_tokens, blocks[i]).view("<u2")
                    assert (words == kv[:, :, 256 * i : 256 * i + 256]).all(), i


def test_a_worker_that_stands_still_holds_up_nobody():
    """A decode worker that is stopped in the middle of its watch: its layers land, another's transfers go on as before, and
    it is told everything in order when it runs again."""
    layers = 48
    group = small_group(layers=range(layers), num_blocks=24)
    patient = dict(transfer__progress_timeout_ms=20000)  # silence is not what this is about
    with running(**patient) as a, running(**patient) as b, a.client() as source, b.client() as target:
        name = unique("still")
        here = make_side(source, a, [group], {0: [1, 2, 3]})
        there = make_side(target, b, [group], {0: [5, 0, 7]})
        command = [sys.executable, "-c", _WATCHER, str(pathlib.Path(__file__).parent), b.worker, name, str(layers)]
        with here.pool, there.pool, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            try:
                kv = random_words(np.random.default_rng(71), (layers, 2, 10, 2, 16), "float16")
                fill(here, [kv])
                where = dict(token_count=10, blocks=here.blocks, policy=skv.policy(**RAW))

                def quickly(tag):
                    took = []
                    for i in range(ROUNDS):
                        target.expect(f"{name}.{tag}{i}", pool=there.pool, token_count=10, blocks=there.blocks)
                        source.send(f"{name}.{tag}{i}", peer=b.peer, pool=here.pool, **where)
                        took.append(target.wait(f"{name}.{tag}{i}", timeout_s=30).duration_seconds)
                    return statistics.median(took)

                alone = quickly("alone")
                assert worker.stdout.readline().strip() == "expecting"
                source.send(name, peer=b.peer, pool=here.pool, layerwise=True, deadline_ms=120000, **where)
                source.advance(name, layers=1, tokens=10)
                assert worker.stdout.readline().strip() == "watching"
                worker.send_signal(signal.SIGSTOP)
                before = rss_kib(b)
                for layer in range(2, layers):
                    source.advance(name, layers=layer, tokens=10)
                beside = quickly("beside")
                source.advance(name, layers=layers, tokens=10)
                report = source.wait(name, role="SENDER", timeout_s=30)
                assert report.state == report_pb2.TRANSFER_STATE_COMMITTED, "the worker need not read for its blocks to land"
                grown = rss_kib(b) - before
                print(f"\nalone {alone * 1e3:.1f} ms, beside {beside * 1e3:.1f} ms: {beside / alone:.1f} times; RSS grew by {grown} KiB")
                assert beside < max(FACTOR * alone, 0.05)
                assert grown < 4096 + SANITIZER_KIB
            finally:
                worker.send_signal(signal.SIGCONT)
            # Late, but whole and in order, with the end last.
            told = worker.stdout.read().split()
            assert told[-1] == "COMMITTED" and [int(n) for n in told[:-1]] == sorted({int(n) for n in told[:-1]})
            assert int(told[-2]) == layers
            assert worker.wait(30) == 0


# A decode worker that expects, says so, and reads its watch only when it runs: DAEMON TRANSFER LAYERS.
_WATCHER = """
import sys
import spectrumkv as skv
from spectrumkv.v1 import report_pb2
sys.path.insert(0, sys.argv[1])
from moves import small_group
client = skv.Client(sys.argv[2])
group = small_group(layers=range(int(sys.argv[4])))
with client.shared_memory_pool([group], model="m") as pool:
    client.expect(sys.argv[3], pool=pool, token_count=10, blocks=[1, 2, 3], deadline_ms=120000)
    print("expecting", flush=True)
    watch = client.watch(sys.argv[3], timeout_s=120)
    first = next(watch)
    print("watching", flush=True)
    for event in watch:
        if event.HasField("layers_ready"):
            print(event.layers_ready.layers)
        if event.HasField("terminal"):
            print(report_pb2.TransferState.Name(event.terminal.state)[15:])
"""
