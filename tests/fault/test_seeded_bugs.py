"""Each invariant catches a bug that is put in on purpose: a check that never fails proves nothing.

The bugs are done to real daemons and real pools through the test's seam (torture.Saboteur). Those of AGREEMENT alone are
lies told to the recorder: from outside, the product cannot be made to forget a commit.
"""

import signal
import socket
import threading
import time

import contents
import invariants
import plan
import pytest
import torture
from actors import PROGRESS_S, World

from spectrumkv.v1 import admin_service_pb2

SEED = 7


@pytest.fixture(scope="module")
def world(surroundings):
    net, disk_bytes, _ = surroundings
    world = World(SEED, net, disk_bytes=disk_bytes)
    yield world
    world.close()


def point_of(kind, number=0, **changes):
    """A point in which nothing but `kind` happens; its first transfer is a RAW push in layers, the others are by chance."""
    point = plan.make_point(SEED, number, (kind,), time.monotonic_ns())
    for name, value in dict(layerwise=True, pull=False, policy="RAW", refined=False, **changes).items():
        setattr(point.first, name, value)
    return point


def caught(world, name, saboteur, point):
    """The point fails, for this invariant."""
    _, wrong = torture.run_point(world, point, saboteur)
    assert any(fault.startswith(name + ":") for fault in wrong), wrong
    print([fault for fault in wrong if fault.startswith(name)][0])


def test_nothing_is_found_where_there_is_no_bug(world):
    ends = []
    for number in range(3):
        point = point_of("none", number)
        point.transfers[1].policy, point.transfers[1].refined = "Q4", True
        for transfer in point.transfers:
            transfer.cached = False  # that ends a refinement that is under way
        record, wrong = torture.run_point(world, point)
        assert wrong == [] and all(half.state == "COMMITTED" for half in record.halves.values())
        ends += [(found.state, found.exact) for found in record.refinements.values()]
    assert len(ends) >= 3 and set(ends) == {("COMMITTED", True)}


class FlipsAByte(torture.Saboteur):
    """A byte of a committed destination is another one: what a decoder that computes wrongly would leave."""

    def before_check(self, world, record):
        first = record.point.first
        world.workers[first.target].cache[0, 0, first.target_blocks[0], 3, 0, 5] ^= 1


class LeavesTheTail(torture.Saboteur):
    """The rest of the last block is not empty."""

    def before_check(self, world, record):
        first = record.point.first
        world.workers[first.target].cache[1, 1, first.target_blocks[-1], -1, 0, 0] = 1


class WritesBeside(torture.Saboteur):
    """A block that is in no transfer is written, as by a block table that is off by one."""

    def before_check(self, world, record):
        first = record.point.first
        taken = {b for t in record.point.transfers for b in (t.target_blocks if t.target == first.target else t.source_blocks)}
        free = next(block for block in range(contents.BLOCKS) if block not in taken)
        world.workers[first.target].cache[0, 0, free, 0, 0, 0] ^= 1


@pytest.mark.parametrize("name, saboteur", [("CONTENT", FlipsAByte()), ("CONTENT", LeavesTheTail()), ("BYSTANDERS", WritesBeside())],
                         ids=["flipped", "tail", "beside"])  # fmt: skip
def test_destinations(name, saboteur, world):
    caught(world, name, saboteur, point_of("none", content="middle"))


class ForgetsARefinement(torture.Saboteur):
    """A lie of the recorder: a refinement has not ended."""

    def before_check(self, world, record):
        record.refinements[record.point.first.name].state = ""


@pytest.mark.parametrize("name, saboteur", [("CONTENT", FlipsAByte()), ("REFINED", ForgetsARefinement())],
                         ids=["flipped", "forgets"])  # fmt: skip
def test_refinements(name, saboteur, world):
    point = point_of("none", content="middle")
    point.first.policy, point.first.refined = "Q4", True
    caught(world, name, saboteur, point)


class WritesLate(torture.Saboteur):
    """A destination is written after its transfer was reported failed."""

    def before_check(self, world, record):
        for (_, role), half in record.halves.items():
            if role == "RECEIVER" and half.left is not None:
                world.workers[half.side].cache[0, 0, half.transfer.target_blocks[0], 0, 0, 0] ^= 1


def test_late_writes(world):
    point = point_of("kill_sender_worker")
    point.moment, point.layers, point.delay_s = "stream", 2, 0
    point.first.pauses_s = [0.1] * contents.LAYERS
    caught(world, "LATE", WritesLate(), point)


class ForgetsItsCommit(torture.Saboteur):
    """A lie of the recorder: a receiver that had committed says FAILED."""

    def before_check(self, world, record):
        half = record.halves[record.point.first.name, "RECEIVER"]
        half.state, half.reason = "FAILED", "FORGOTTEN"


class BlamesTheReceiver(torture.Saboteur):
    """A lie of the recorder: it is the receiver who says that it does not know."""

    def before_check(self, world, record):
        record.halves[record.point.first.name, "RECEIVER"].reason = "OUTCOME_UNKNOWN"


@pytest.mark.parametrize("saboteur", [ForgetsItsCommit(), BlamesTheReceiver()], ids=["forgets", "blames"])
def test_agreement(saboteur, world):
    caught(world, "AGREEMENT", saboteur, point_of("none"))


class Freezes(torture.Saboteur):
    """A daemon stands still behind the checker's back for longer than the deadlines: its transfers do not end in time."""

    def __init__(self):
        self.threads = []

    def before_wait(self, world, record):
        daemon = world.daemons[record.point.first.target]
        daemon.signal(signal.SIGSTOP)
        limit = max(t.deadline_ms for t in record.point.transfers) / 1000 + 1.5
        self.threads.append(threading.Timer(limit, lambda: daemon.signal(signal.SIGCONT)))
        self.threads[0].start()

    def before_check(self, world, record):
        for thread in self.threads:
            thread.join()


def test_deadline(world):
    point = point_of("none")
    point.moment, point.layers, point.delay_s = "stream", 1, 0
    for transfer in point.transfers:
        transfer.deadline_ms = 2000
    point.first.pauses_s = [0.1] * contents.LAYERS
    caught(world, "DEADLINE", Freezes(), point)


class CancelsOne(torture.Saboteur):
    """A transfer ends that nothing was to end."""

    def before_wait(self, world, record):
        first = record.point.first
        world.daemons[first.target].observer.cancel(first.name, role="RECEIVER")


def test_survival(world):
    point = point_of("pause_sender_worker")
    point.moment, point.layers, point.delay_s = "stream", 1, 0
    point.first.pauses_s = [0.2] * contents.LAYERS
    caught(world, "SURVIVAL", CancelsOne(), point)


def test_silence(surroundings):
    """A receiver whose daemon has ten times the patience that the checker was promised."""
    net, disk_bytes, _ = surroundings
    other = World(SEED, net, disk_bytes=disk_bytes, keys=({"transfer__progress_timeout_ms": int(PROGRESS_S * 10000)},) * 2)
    try:
        point = point_of("stop_sender_daemon")
        point.moment, point.layers, point.delay_s, point.length = "stream", 2, 0, 3.0
        point.first.pauses_s = [0.1] * contents.LAYERS
        caught(other, "SILENCE", torture.Saboteur(), point)
    finally:
        other.close()


class Drains(torture.Saboteur):
    """A survivor takes no new work."""

    def before_leaks(self, world, record):
        with world.daemons[0].admin() as admin:
            admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=5000), timeout=20)


class KeepsBlocks(torture.Saboteur):
    """Somebody's reservation is never given back: a transfer that nobody will send."""

    def before_leaks(self, world, record):
        world.workers[0].order(do="start", name=f"kept-{time.monotonic_ns()}", role="expect", tokens=16, blocks=[71],
                               deadline_ms=8000)  # fmt: skip
        deadline = time.monotonic() + 5
        while world.daemons[0].status().inflight_transfers == 0 and time.monotonic() < deadline:
            time.sleep(0.01)


class KeepsSockets(torture.Saboteur):
    """A survivor ends up with connections that nobody uses, each of which is a descriptor of the daemon."""

    def __init__(self):
        self.sockets = []

    def before_leaks(self, world, record):
        for _ in range(60):
            self.sockets.append(socket.socket(socket.AF_UNIX))
            self.sockets[-1].connect(world.daemons[0].worker)


class KeepsAMapping(torture.Saboteur):
    """A pool more than there are workers: its segment stays mapped."""

    def before_leaks(self, world, record):
        daemon = world.daemons[0]
        self.client = daemon.client()
        self.pool = self.client.shared_memory_pool([contents.group()], model="kept", shared_dir=str(daemon.shared_dir))


def test_leaks(world):
    base = point_of("none")
    assert torture.run_point(world, base)[1] == []  # there is something to compare with
    caught(world, "LEAKS", KeepsBlocks(), point_of("none"))
    time.sleep(4.5)  # its deadline is 8 s, of which the check has waited for 4
    sockets = KeepsSockets()
    caught(world, "LEAKS", sockets, point_of("none"))
    for one in sockets.sockets:
        one.close()
    mapping = KeepsAMapping()
    caught(world, "LEAKS", mapping, point_of("none"))
    mapping.pool.close()
    mapping.client.close()
    assert torture.run_point(world, point_of("none"))[1] == []


def test_serves(world):
    caught(world, "SERVES", Drains(), point_of("none"))
    world.daemons[0].kill()
    world.mend()


def test_hits():
    hits = {kind: 1 for kind in plan.KINDS if kind != "mute_sender"}
    assert invariants.unhit(plan.KINDS, hits) == ["HITS: mute_sender never met a transfer that was under way"]
