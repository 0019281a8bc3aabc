"""Many transfers at once, scarce slots, and sources that change while they are read."""

import threading
import time

import numpy as np
import pytest
from moves import POISON, check, fill, make_side, move, poison, random_words, small_group, unique
from real_daemon import refused, running

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

RAW = dict(allocator="RAW", budget=1.1)
TRANSFERS = 50


def test_two_daemons_that_send_to_each_other():
    """50 transfers each way, 4 slots in each partition: nobody waits for ever, and every word arrives."""
    rng = np.random.default_rng(41)
    slots = dict(memory__send_slots=4, memory__receive_slots=4)
    group = small_group(layers=range(4), heads=4, head_dim=64, block_tokens=16, num_blocks=5 * TRANSFERS)
    tokens = 75
    with running(**slots) as a, running(**slots) as b, a.client() as at_a, b.client() as at_b:
        ends = []
        for here, there, near, far in ((a, b, at_a, at_b), (b, a, at_b, at_a)):
            source = make_side(near, here, [group], {0: []}, model=f"from {here.peer}")
            target = make_side(far, there, [group], {0: []}, model=f"from {here.peer}")
            kv = [random_words(rng, (4, 2, tokens, 4, 64), "float16") for _ in range(TRANSFERS)]
            order = [[int(x) for x in rng.permutation(5 * TRANSFERS)] for _ in range(2)]
            blocks = [[o[5 * i : 5 * i + 5] for i in range(TRANSFERS)] for o in order]
            for i in range(TRANSFERS):
                source.blocks = {0: blocks[0][i]}
                fill(source, [kv[i]])
            poison(target)
            ends.append((there, near, far, source, target, kv, blocks, unique("both")))
        for i in range(TRANSFERS):
            for there, near, far, source, target, _, blocks, name in ends:
                far.expect(f"{name}.{i}", pool=target.pool, token_count=tokens, blocks=blocks[1][i])
                near.send(f"{name}.{i}", peer=there.peer, pool=source.pool, token_count=tokens, blocks=blocks[0][i],
                          policy=skv.policy(**RAW))  # fmt: skip
        for _, near, far, source, target, kv, blocks, name in ends:
            for i in range(TRANSFERS):
                assert far.wait(f"{name}.{i}", role="RECEIVER", timeout_s=60).state == report_pb2.TRANSFER_STATE_COMMITTED
                assert near.wait(f"{name}.{i}", role="SENDER", timeout_s=60).chunks_resent == 0
                words = target.pool.read_tokens(tokens, blocks[1][i]).view("<u2")
                assert (words == kv[i]).all(), f"{name}.{i}"
        for _, _, _, source, target, *_ in ends:
            source.pool.close()
            target.pool.close()
        for daemon in (a, b):
            metrics = daemon.metrics()
            assert metrics["spectrumkv_inflight_transfers"] == 0


@pytest.fixture
def guarded(source, target, prefill, decode):
    """A source whose blocks have generations, and a destination; (source, destination)."""
    group = small_group()
    here = make_side(source, prefill, [group], {0: [1, 2, 3]}, generations=True)
    there = make_side(target, decode, [group], {0: [5, 0, 7]})
    with here.pool, there.pool:
        yield here, there


def begin(name, source, target, decode, here, there):
    target.expect(name, pool=there.pool, token_count=12, blocks=there.blocks)
    source.send(name, peer=decode.peer, pool=here.pool, token_count=12, blocks=here.blocks, policy=skv.policy(**RAW))


def outcome(name, source, target):
    """COMMITTED or the reason, the same on both sides."""
    reasons = []
    for client in (source, target):
        try:
            client.wait(name, timeout_s=20)
            reasons.append("COMMITTED")
        except skv.TransferFailed as failed:
            reasons.append(failed.reason)
    assert reasons[0] == reasons[1], reasons
    return reasons[0]


def test_blocks_that_are_being_written_are_not_sent(guarded, source, target, decode, transfer_id):
    here, there = guarded
    words = random_words(np.random.default_rng(43), (2, 2, 12, 2, 16), "float16")
    fill(here, [words])
    poison(there)
    with here.pool.writing([2]):
        begin(transfer_id, source, target, decode, here, there)
        with refused("FAILED_PRECONDITION", "SOURCE_CHANGED"):
            source.wait(transfer_id, timeout_s=20)
        with refused("FAILED_PRECONDITION", "SOURCE_CHANGED"):
            target.wait(transfer_id, timeout_s=20)
        assert (there.pool.segment.memory == POISON).all()
    with here.pool.writing([5]):  # of a block that is not sent
        name = transfer_id + ".calm"
        begin(name, source, target, decode, here, there)
        assert source.wait(name, timeout_s=20).source_guard == "generations"
        assert target.wait(name, timeout_s=20).state == report_pb2.TRANSFER_STATE_COMMITTED
        check(there, [words])


def test_a_worker_that_writes_all_the_time(guarded, source, target, decode, transfer_id):
    """Each chunk, here a layer, is of one moment, or the transfer fails: old and new values never mix."""
    here, there = guarded
    words = here.pool.kv().view("<u2")
    end, writes = threading.Event(), 0

    def write():
        nonlocal writes
        while not end.is_set():
            writes += 1
            with here.pool.writing([1, 2, 3]):
                for block in (1, 2, 3):
                    words[:, :, block] = writes % 30000
                    end.wait(0.001)  # old and new side by side for a while
            end.wait(0.003 * (writes % 3))  # time to read, sometimes

    writer = threading.Thread(target=write)
    writer.start()
    ends = []
    try:
        for i in range(60):
            name = f"{transfer_id}.{i}"
            begin(name, source, target, decode, here, there)
            ends.append(outcome(name, source, target))
            assert ends[-1] in ("COMMITTED", "SOURCE_CHANGED")
            if ends[-1] == "COMMITTED":
                landed = there.pool.read_tokens(12, there.blocks[0]).view("<u2")
                assert [len(np.unique(landed[layer])) for layer in range(2)] == [1, 1]
    finally:
        end.set()
        writer.join()
    assert set(ends) == {"COMMITTED", "SOURCE_CHANGED"}, (writes, ends)
    begin(transfer_id, source, target, decode, here, there)
    assert outcome(transfer_id, source, target) == "COMMITTED"
    assert (there.pool.read_tokens(12, there.blocks[0]).view("<u2") == writes % 30000).all()


def test_more_transfers_than_allowed(target, decode, transfer_id):
    group = small_group()
    with running(transfer__max_active=2) as daemon, daemon.client() as client:
        side = make_side(client, daemon, [group], {0: []})
        with side.pool:
            for i in range(2):
                client.expect(f"{transfer_id}.{i}", pool=side.pool, token_count=4, blocks=[i])
            with pytest.raises(skv.SpectrumKVError) as full:
                client.expect(f"{transfer_id}.2", pool=side.pool, token_count=4, blocks=[2])
            assert (full.value.code, full.value.reason) == ("RESOURCE_EXHAUSTED", "TRANSFERS_FULL")
            assert full.value.retry_after_ms > 0
            client.cancel(f"{transfer_id}.0")
            client.expect(f"{transfer_id}.2", pool=side.pool, token_count=4, blocks=[2])  # its block was not kept
            for i in (1, 2):
                client.cancel(f"{transfer_id}.{i}")


def test_more_waiting_peers_than_allowed(source, prefill, transfer_id):
    """Sends without an Expect wait at the receiver; one too many of one host is told to come back, and does."""
    group = small_group()
    with running(peer__max_waiting_transfers=4) as crowded, crowded.client() as target:
        here = make_side(source, prefill, [group], {0: [1, 2, 3]})
        there = make_side(target, crowded, [group], {0: [1, 2, 3]})
        with here.pool, there.pool:
            fill(here, [random_words(np.random.default_rng(47), (2, 2, 10, 2, 16), "float16")])
            for i in range(3):
                source.send(f"{transfer_id}.{i}", peer=crowded.peer, pool=here.pool, token_count=10, blocks=here.blocks,
                            policy=skv.policy(**RAW))  # fmt: skip
            # Which of the three dials last is not ours to say.
            turned_away = []
            deadline = time.monotonic() + 15
            while not turned_away and time.monotonic() < deadline:
                time.sleep(0.05)
                turned_away = [i for i in range(3) if source.get_transfer(f"{transfer_id}.{i}").reason == "WAITING_FULL"]
            assert len(turned_away) == 1
            for i in set(range(3)) - set(turned_away):
                target.expect(f"{transfer_id}.{i}", pool=there.pool, token_count=10, blocks=there.blocks)
                target.wait(f"{transfer_id}.{i}", timeout_s=20)


def test_the_same_blocks_sent_many_times_at_once(source, target, prefill, decode, transfer_id):
    """Sources are shared: one prefix to several destinations."""
    group = small_group(num_blocks=40)
    kv = random_words(np.random.default_rng(53), (2, 2, 10, 2, 16), "float16")
    here = make_side(source, prefill, [group], {0: [3, 1, 2]})
    there = make_side(target, decode, [group], {0: []})
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        for i in range(10):
            target.expect(f"{transfer_id}.{i}", pool=there.pool, token_count=10, blocks=range(3 * i, 3 * i + 3))
            source.send(f"{transfer_id}.{i}", peer=decode.peer, pool=here.pool, token_count=10, blocks=here.blocks,
                        policy=skv.policy(**RAW))  # fmt: skip
        for i in range(10):
            target.wait(f"{transfer_id}.{i}", timeout_s=30)
            words = there.pool.read_tokens(10, range(3 * i, 3 * i + 3)).view("<u2")
            assert (words == kv).all()


def test_a_transfer_within_one_daemon(source, prefill, transfer_id):
    """Both halves in one daemon: the role says which is meant."""
    group = small_group()
    kv = random_words(np.random.default_rng(59), (2, 2, 10, 2, 16), "float16")
    here = make_side(source, prefill, [group], {0: [3, 1, 2]})
    there = make_side(source, prefill, [group], {0: [4, 9, 0]})
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        move(transfer_id, source, source, prefill, prefill, here, there, 10, policy=skv.policy(**RAW))
        check(there, [kv])
        with refused("INVALID_ARGUMENT", "AMBIGUOUS_ROLE"):
            source.get_transfer(transfer_id)
