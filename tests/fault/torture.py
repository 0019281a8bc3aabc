"""A point from begin to end: transfers, the fault, the checks, and the same daemons again for the next one."""

import threading
import time
from dataclasses import replace

import contents
import faults
import invariants
import refinements
from observer import Observer, Record
from plan import Transfer


class Saboteur:
    """The test's seam for bugs: does nothing. test_seeded_bugs.py has some that do, one for each invariant."""

    def before_wait(self, world, record):
        """The fault is done; transfers may still run."""

    def before_check(self, world, record):
        """All is over, and the invariants are about to be checked."""

    def before_leaks(self, world, record):
        """The world is whole again and serves the next transfers."""


def lay_out(world, record):
    """Poisons all blocks but those of sources that are whole, and remembers everything."""
    for side in range(2):
        world.workers[side].memory[:] = contents.POISON
    for transfer in record.point.transfers:
        if not transfer.layerwise:
            cache = world.workers[transfer.source].cache
            contents.put_layers(cache, contents.words(world.seed, transfer.content), transfer.source_blocks,
                                list(range(contents.LAYERS)))  # fmt: skip
    record.before = [worker.cache.copy() for worker in world.workers]


def _orders(world, transfer):
    """(delay, role, order) of both halves."""
    common = dict(do="start", name=transfer.name, tokens=transfer.tokens, deadline_ms=transfer.deadline_ms,
                  refined=transfer.refined)  # fmt: skip
    sender = dict(common, role="publish" if transfer.pull else "send", blocks=transfer.source_blocks, policy=transfer.policy, cached=transfer.cached,
                  layerwise=transfer.layerwise, content=transfer.content, pauses_s=transfer.pauses_s,
                  peer=world.daemons[transfer.target].peer)  # fmt: skip
    receiver = dict(common, role="fetch" if transfer.pull else "expect", blocks=transfer.target_blocks,
                    peer=world.daemons[transfer.source].peer)  # fmt: skip
    return ((transfer.delays_s[0], "SENDER", sender), (transfer.delays_s[1], "RECEIVER", receiver))


def give_orders(world, record):
    orders = []
    for transfer in record.point.transfers:
        for delay, role, order in _orders(world, transfer):
            side = transfer.source if role == "SENDER" else transfer.target
            orders.append((delay, transfer.name, role, side, order))
    begin = time.monotonic()
    for delay, name, role, side, order in sorted(orders, key=lambda o: o[0]):
        time.sleep(max(0, begin + delay - time.monotonic()))
        record.ordered_at[name, role] = time.monotonic()
        world.workers[side].order(**order)


def _await_moment(world, record, observer):
    point = record.point
    first = record.halves[point.first.name, "RECEIVER"]
    if point.moment == "stream":
        observer.wait(lambda: first.layers >= point.layers or first.state, 5)
    elif point.moment == "commit":
        worker = world.workers[point.first.source]
        observer.wait(lambda: worker.told(name=point.first.name, event="last") or first.state, 5, look_s=0.001)
    elif point.moment == "refine":
        observer.wait(lambda: first.state, 5, look_s=0.001)
        observer.wait(lambda: refinements.runs(world, point.first), 0.5, look_s=0.001)
    time.sleep(point.delay_s)


def _run_transfers(world, record, saboteur):
    observer = Observer(world, record, look_late=record.point.kind != "disk_full_writing")
    giver = threading.Thread(target=give_orders, args=(world, record))
    giver.start()
    _await_moment(world, record, observer)
    first = [record.halves[record.point.first.name, role] for role in ("SENDER", "RECEIVER")]
    if record.point.moment == "refine":
        record.hit = refinements.runs(world, record.point.first)
    else:
        record.hit = not all(half.state for half in first)
    faults.fire(world, record)
    giver.join()
    saboteur.before_wait(world, record)
    observer.wait(observer.all_over, 0.5)  # let it be seen when each of them began
    while not observer.all_over():
        left = invariants.last_deadline(world, record) + 1.5 - time.monotonic()
        if left <= 0 or observer.wait(observer.all_over, min(left, 0.5)):
            break
    observer.stop()
    refinements.await_ends(world, record)


def undisturbed(world, transfer):
    """Runs one transfer that nothing happens to; "" or what went wrong."""
    world.workers[transfer.target].cache[:, :, transfer.target_blocks] = 0
    if not transfer.layerwise:
        contents.put_layers(world.workers[transfer.source].cache, contents.words(world.seed, transfer.content),
                            transfer.source_blocks, list(range(contents.LAYERS)))  # fmt: skip
    for _, role, order in _orders(world, transfer):
        world.workers[transfer.source if role == "SENDER" else transfer.target].order(**order)
    for side, role in ((transfer.target, "RECEIVER"), (transfer.source, "SENDER")):
        end, last = time.monotonic() + 10, ""
        while True:
            try:
                world.daemons[side].observer.wait(transfer.name, role=role, timeout_s=10)
                break
            except Exception as error:  # noqa: BLE001: told below
                last = str(error)
                worker = world.workers[side]
                if refused := worker.told(name=transfer.name, event="refused"):
                    return f"{role.lower()} at {'AB'[side]}: {refused['text']}"
                if "UNKNOWN_TRANSFER" not in last or time.monotonic() > end:
                    return f"{role.lower()} at {'AB'[side]}: {last}"
                time.sleep(0.005)
    return ""


def settle(world, name):
    """Waits for the workers' writers: what they still write would land in sources of the next transfers."""
    for worker in world.workers:
        worker.order(do="settle", name=name)
        assert worker.wait_for(lambda event: event.get("event") == "settled" and event["name"] == name, 15)["writers"] == 0


def learn(world, transfer):
    """Sees to it that World.expected() knows this transfer: coded words are compared with those of an undisturbed one."""
    for number, policy in enumerate(contents.CELLS_OF.get(transfer.policy, (transfer.policy,))):
        if (transfer.content, policy) in world.references:
            continue
        words = contents.words(world.seed, transfer.content)
        if policy != "RAW":
            twin = replace(transfer, name=f"{transfer.name}.twin{number}", policy=policy, layerwise=False, deadline_ms=8000,
                           refined=False, cached=False)  # fmt: skip
            if wrong := undisturbed(world, twin):
                raise AssertionError(f"an undisturbed transfer failed: {wrong}")
            words = contents.tokens_of(world.workers[twin.target].cache, twin.target_blocks, twin.tokens)[0].copy()
        world.references[transfer.content, policy] = words


def serves_next(world, name):
    """SERVES: both ways a RAW and a coded transfer commit, and are exactly right."""
    for source in range(2):
        for number, (policy, pull) in enumerate((("RAW", bool(source)), ("b=0.3", not source))):
            count = contents.blocks_for(contents.TOKENS["middle"])
            transfer = Transfer(f"{name}.next.{source}{number}", source, pull, False, policy, "middle", 3000, [],
                                (0, 0), list(range(count)), list(range(count, 2 * count)))  # fmt: skip
            if wrong := undisturbed(world, transfer):
                yield f"SERVES: the next transfer from {'AB'[source]} failed: {wrong}"
                continue
            landed = contents.tokens_of(world.workers[transfer.target].cache, transfer.target_blocks, transfer.tokens)[0].copy()
            learn(world, transfer)
            if contents.wrong_words(landed, world.expected(transfer)):
                yield f"SERVES: the next transfer from {'AB'[source]} brought wrong words ({policy})"


def run_point(world, point, saboteur=None):
    """(the record, all that was wrong)."""
    saboteur = saboteur or Saboteur()
    for transfer in point.transfers:
        learn(world, transfer)
    record = Record(point)
    lay_out(world, record)
    starts = [daemon.starts for daemon in world.daemons]
    _run_transfers(world, record, saboteur)
    faults.undo(world)  # before the checks: a look into a hole of a full disk would end this process
    refinements.release(world, record)  # first: the daemon begins anew by itself, and would write while blocks are looked at
    saboteur.before_check(world, record)
    wrong = invariants.check(world, record)
    if point.kind == "disk_full_writing":
        world.replace_worker(point.first.target)  # its pool has holes and is given up
    world.mend()
    settle(world, point.first.name)
    saboteur.before_leaks(world, record)
    wrong += serves_next(world, point.first.name)
    for side, daemon in enumerate(world.daemons):
        if daemon.starts != starts[side]:
            world.base[side] = None  # a new process
        wrong += [f"LEAKS: {'AB'[side]}: {what}" for what in world.left_over(side)]
    return record, wrong
