"""Refinements of a point's transfers: the destination's daemon begins them when a base has committed (policy.refine), and
writes them right into the blocks. They end in any way they like, but they end, and leave every cell coarse or exact."""

import contextlib
import time
from dataclasses import dataclass

from observer import TERMINAL, state_name

import spectrumkv as skv

# So that one takes some tenths of a second, and a fault can meet it.
RATE_BYTES = 2 << 20
# More than the sources of a point have.
CACHE_BYTES = 64 << 20
DEADLINE_S = 5.0  # the daemons' default
_BEGIN_S = 0.5


@dataclass
class Refined:
    """state: one of TERMINAL, "NEVER" begun, "GONE" with its daemon, or "" where it has not ended."""

    transfer: object
    state: str = ""
    reason: str = ""
    exact: bool = False
    ended_at: float = 0

    def __str__(self):
        return f"refinement of {self.transfer.name} at {'AB'[self.transfer.target]} ({self.state or 'not over'} {self.reason})"


def look(world, transfer):
    """(state, report) of the refinement at its receiver; ("", None) where there is none."""
    try:
        report = world.daemons[transfer.target].observer.get_transfer(transfer.name + ".refine-1", role="RECEIVER")
    except skv.SpectrumKVError:
        return "", None
    return state_name(report.state), report


def runs(world, transfer):
    state, report = look(world, transfer)
    return report is not None and state not in TERMINAL


def latest_end(record, transfer):
    """When its refinement must be over; one whose daemon was stopped, later."""
    return max(record.halves[transfer.name, "RECEIVER"].ended_at + DEADLINE_S, record.healed_at) + 1.0


def await_ends(world, record):
    """Until none writes any more, or should not."""
    for transfer in record.point.transfers:
        base = record.halves[transfer.name, "RECEIVER"]
        if not transfer.refined or base.state != "COMMITTED":
            continue
        found = record.refinements[transfer.name] = Refined(transfer)
        while not found.state and time.monotonic() < latest_end(record, transfer) + 0.5:
            state, report = look(world, transfer)
            if state in TERMINAL:
                found.state, found.reason, found.exact = state, report.reason, report.exact
            elif report is None and transfer.target in record.dead_daemons:
                found.state = "GONE"
            elif report is None and time.monotonic() > max(base.ended_at, record.healed_at) + _BEGIN_S:
                found.state = "NEVER"
            else:
                time.sleep(0.01)
        found.ended_at = time.monotonic()


def release(world, record):
    """Gives back what is still retained. When this returns, no block of it is read or written."""
    for transfer in filter(lambda t: t.refined, record.point.transfers):
        for side, role in ((transfer.target, "RECEIVER"), (transfer.source, "SENDER")):
            with contextlib.suppress(skv.SpectrumKVError):  # it went with its daemon
                world.daemons[side].observer.release(transfer.name, role=role)
