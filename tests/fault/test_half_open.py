"""Connections that hang: their last words were lost, TCP tries again at ever longer intervals, and nobody knows."""

import time

import contents
import pytest
import torture
from actors import PROGRESS_S, World
from observer import Observer, Record
from plan import Point, Transfer

SEED = 13
# TCP tries after 0.2, 0.6, 1.4 and 3 s: healed after this, a connection that still hung would do so for longer than a
# transfer waits for its peer.
LOST_FOR_S = 1.5


@pytest.fixture(scope="module")
def world(surroundings):
    net, disk_bytes, missing = surroundings
    if net is None:
        pytest.skip(f"SKIPPED: connections that hang: {missing}")
    world = World(SEED, net, disk_bytes=disk_bytes)
    yield world
    world.close()


@pytest.mark.parametrize("how", ["mute_dialler", "mute_acceptor", "cut"])
@pytest.mark.parametrize("source", [0, 1], ids=["from_a", "from_b"])
def test_the_next_transfer_commits(how, source, world):
    name = f"hangs-{how}-{source}"
    assert list(torture.serves_next(world, f"{name}.before")) == []  # there are connections that are kept
    count = contents.blocks_for(contents.TOKENS["middle"])
    # So short that it ends before its peer counts as silent: nobody has a reason to give the connection up.
    transfer = Transfer(name, source, False, False, "RAW", "middle", int(PROGRESS_S * 400), [], (0, 0), list(range(count)),
                        list(range(count, 2 * count)))  # fmt: skip
    record = Record(Point(SEED, 0, "none", "hello", 0, 0, 0, [transfer]))
    torture.lay_out(world, record)
    observer = Observer(world, record, look_late=True)
    try:
        if how == "cut":
            world.net.cut()
        else:
            world.net.mute(source if how == "mute_dialler" else 1 - source)
        lost = time.monotonic()
        torture.give_orders(world, record)
        assert observer.wait(observer.all_over, 5)
        time.sleep(max(0, lost + LOST_FOR_S - time.monotonic()))
    finally:
        world.net.heal()
        observer.stop()
    assert [half.state for half in record.halves.values()] == ["EXPIRED", "EXPIRED"]
    assert list(torture.serves_next(world, f"{name}.after")) == []
