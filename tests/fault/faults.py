"""How each kind of fault is done to the world, and undone."""

import ctypes
import os
import signal
import time

import contents
from actors import PROGRESS_S

_PUNCH, _KEEP_SIZE = 0x02, 0x01
_libc = ctypes.CDLL(None, use_errno=True)
# So slow that a point's transfers take a second or two, and still fit their deadlines.
SLOW_RATE = "16mbit"
FILLER = "filler"


def fire(world, record):
    """The fault of the record's point; returns once it is over, where it is of the kinds that end by themselves."""
    point = record.point
    what, _, rest = point.kind.partition("_")
    if what in ("kill", "pause", "stop"):
        _process(world, record, what, *_actor(world, point, rest))
    elif what == "disk":
        _fill_disk(world, record, point)
    elif what == "none":
        record.fired_at = time.monotonic()
    else:
        _link(world, record, point)


def undo(world):
    """Heals the link and empties the disks. World.mend() starts again who was killed."""
    if world.net is not None:
        world.net.heal()
    for side in range(2):
        (world.shared_dir(side) / FILLER).unlink(missing_ok=True)


def _actor(world, point, words):
    role, _, what = words.partition("_")
    side = point.first.source if role == "sender" else point.first.target
    return side, (world.daemons if what == "daemon" else world.workers)[side], what


def _process(world, record, what, side, actor, kind):
    record.fired_at = time.monotonic()
    if what == "kill":
        if kind == "daemon":
            record.dead_daemons.add(side)
        actor.kill()
        return
    actor.signal(signal.SIGSTOP)
    time.sleep(record.point.length * PROGRESS_S)
    actor.signal(signal.SIGCONT)
    record.healed_at = time.monotonic()


def _link(world, record, point):
    record.fired_at = time.monotonic()
    if point.kind == "slow_link":
        return world.net.slow(SLOW_RATE)
    if point.kind.startswith("cut"):
        world.net.cut()
    else:
        world.net.mute(point.first.source if point.kind == "mute_sender" else point.first.target)
    if point.kind == "cut_briefly":
        time.sleep(point.length * PROGRESS_S)
        world.net.heal()
        record.healed_at = time.monotonic()


def fill(folder):
    """Takes all room that the disk of this folder has left."""
    piece = bytes(1 << 16)
    with open(folder / FILLER, "ab", buffering=0) as file:
        while piece:
            try:
                file.write(piece)
            except OSError:  # ENOSPC; a smaller piece may still fit
                piece = piece[: len(piece) // 2]


def _fill_disk(world, record, point):
    side = point.first.target
    folder, worker = world.shared_dir(side), world.workers[side]
    if point.kind == "disk_full_writing":
        # The destination loses the pages of the layers that are still to come, as when its owner had never written them.
        _punch(folder / worker.segment.lstrip("/"), point.first.target_blocks, range(point.layers, contents.LAYERS))
    fill(folder)
    record.fired_at = time.monotonic()
    if point.kind == "disk_full_registering":
        worker.order(do="another_pool", name=point.first.name + ".more", shared_dir=str(folder))
        told = worker.wait_for(lambda event: event.get("name") == point.first.name + ".more", 10)
        if told["event"] != "refused" or told["errno"] != 28:  # ENOSPC
            record.notes.append(f"a pool on a full disk was not refused for want of room: {told}")


def _punch(path, blocks, layers):
    group = contents.group()
    block_bytes = group.size_bytes // (contents.LAYERS * 2 * contents.BLOCKS)
    descriptor = os.open(path, os.O_RDWR)
    try:
        for layer in layers:
            for plane in range(2):
                for block in blocks:
                    at = ((layer * 2 + plane) * contents.BLOCKS + block) * block_bytes
                    if _libc.fallocate(descriptor, _PUNCH | _KEEP_SIZE, ctypes.c_long(at), ctypes.c_long(block_bytes)) != 0:
                        raise OSError(ctypes.get_errno(), "fallocate")
    finally:
        os.close(descriptor)
