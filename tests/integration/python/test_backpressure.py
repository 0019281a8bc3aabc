"""200 transfers at once through a few staging slots: bounded memory, nobody starves, and who is turned away comes back."""

import pathlib
import statistics
import threading

import numpy as np
from moves import fill, make_side, poison, random_words, small_group, unique
from real_daemon import running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

RAW = dict(allocator="RAW", budget=1.1)
TRANSFERS, SLOTS, TOKENS, BLOCKS = 200, 4, 64, 4
# What a daemon may grow by: slots of both partitions (2 MiB each), and 64 KiB of state for each transfer.
GROWTH_KIB = 2 * SLOTS * 2048 + TRANSFERS * 64


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
            name, over = unique("many"), threading.Event()

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
                skv.retry(lambda: asked(target.expect, f"{name}.{i}", pool=there.pool, **common), **patience)
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


# How much slower transfers of another pair may be, beside those to a receiver that takes 2 MB/s; the cores are shared.
FACTOR, ROUNDS = 10, 15


def test_a_slow_receiver_slows_its_own_transfers_only():
    """Eight transfers to a slow receiver are under way; those to another go on as before."""
    rng = np.random.default_rng(67)
    group = small_group(layers=range(4), heads=4, head_dim=64, block_tokens=16, num_blocks=160)
    tokens, slow_tokens = 64, 256
    with running(memory__send_slots=16) as a, running() as fast, running() as slow, Proxy(slow.peer, bytes_per_second=2e6) as way:
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
                for i in range(8):
                    common = dict(token_count=slow_tokens, blocks=range(16 * i, 16 * i + 16))
                    lame.expect(f"{name}.slow{i}", pool=far.pool, **common)
                    source.send(f"{name}.slow{i}", peer=way.address, pool=here.pool, policy=skv.policy(**RAW), **common)
                beside = quickly("beside")
                under_way = sum(source.get_transfer(f"{name}.slow{i}").state < report_pb2.TRANSFER_STATE_COMMITTED for i in range(8))
                print(f"\nalone {alone * 1e3:.1f} ms, beside a slow receiver {beside * 1e3:.1f} ms: {beside / alone:.1f} times")
                assert under_way > 0, "the slow ones were too quick to show anything"
                assert beside < max(FACTOR * alone, 0.05)
                for i in range(8):
                    assert lame.wait(f"{name}.slow{i}", timeout_s=30).state == report_pb2.TRANSFER_STATE_COMMITTED
