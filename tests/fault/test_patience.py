"""With the progress timeout that a daemon has by default: who is slow is waited for, who is silent is not."""

import signal
import time

import contents
import plan
import pytest
import torture
from actors import World
from observer import Observer, Record

DEFAULT_S = 5.0
SEED = 11


@pytest.fixture(scope="module")
def world(surroundings):
    net, disk_bytes, _ = surroundings
    keys = {"transfer__progress_timeout_ms": int(DEFAULT_S * 1000), "transfer__max_deadline_ms": 60000,
            "transfer__default_deadline_ms": 30000, "peer__connect_timeout_ms": 5000}  # fmt: skip
    world = World(SEED, net, keys=(keys, keys), disk_bytes=disk_bytes)
    yield world
    world.close()


def layer_wise(pauses_s, pull):
    count = contents.blocks_for(contents.TOKENS["long"])
    return plan.Transfer(f"patience-{time.monotonic_ns()}", 0, pull, True, "RAW", "long", 40000, pauses_s, (0, 0),
                         list(range(count)), list(range(count, 2 * count)))  # fmt: skip


def test_a_source_that_pauses_three_times_as_long(world):
    """Push and pull at once: 15 s between two layers, and both commit, to the last word."""
    transfers = [layer_wise([0, 0, 3 * DEFAULT_S, 0, 0, 0], pull) for pull in (False, True)]
    other = contents.blocks_for(contents.TOKENS["long"]) * 2
    transfers[1].source_blocks = [block + other for block in transfers[1].source_blocks]
    transfers[1].target_blocks = [block + other for block in transfers[1].target_blocks]
    record = Record(plan.Point(SEED, 0, "none", "hello", 0, 0, 0, transfers))
    for transfer in transfers:
        torture.learn(world, transfer)
    torture.lay_out(world, record)
    observer = Observer(world, record, look_late=True)
    torture.give_orders(world, record)
    assert observer.wait(observer.all_over, 30)
    observer.stop()
    for half in record.halves.values():
        assert half.state == "COMMITTED" and half.attempts == 1, str(half)
        # From the order, not from when a daemon was seen to begin: that may have been seen late.
        assert half.ended_at - record.ordered_at[half.transfer.name, half.role] > 3 * DEFAULT_S
    assert torture.invariants.check(world, record) == []


def test_a_silent_peer_is_noticed_within_the_default(world):
    """A daemon that stands still: not before 5 s, and soon after."""
    transfer = layer_wise([0, 0, 30, 0, 0, 0], False)
    record = Record(plan.Point(SEED, 1, "none", "stream", 2, 0, 0, [transfer]))
    torture.lay_out(world, record)
    observer = Observer(world, record, look_late=True)
    torture.give_orders(world, record)
    receiver = record.halves[transfer.name, "RECEIVER"]
    assert observer.wait(lambda: receiver.layers == 2, 10)
    world.daemons[0].signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert observer.wait(lambda: receiver.state, 2 * DEFAULT_S)
    world.daemons[0].signal(signal.SIGCONT)
    assert (receiver.state, receiver.reason) == ("FAILED", "PEER_SILENT")
    took = receiver.ended_at - stopped
    print(f"\nnoticed after {took:.2f} s of silence")
    # Its last word may have come up to one heartbeat before it stopped.
    assert DEFAULT_S - DEFAULT_S / 3 - 0.1 < took < DEFAULT_S + 1
    assert observer.wait(observer.all_over, DEFAULT_S)
    observer.stop()
    assert record.halves[transfer.name, "SENDER"].state == "FAILED"
    assert list(torture.serves_next(world, "patience")) == []
