"""Watches both halves of every transfer of a point at the daemons, apart from the workers, and writes down what they say."""

import threading
import time
from dataclasses import dataclass, field

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

TERMINAL = ("COMMITTED", "FAILED", "CANCELLED", "EXPIRED")
_JOINED = ("PLANNED", "STREAMING", "VERIFYING")


def state_name(state):
    """A state of a report or an event, as in TERMINAL."""
    return report_pb2.TransferState.Name(state).removeprefix("TRANSFER_STATE_")


@dataclass
class Half:
    """What a daemon said of its half. state: "" until it is over, then one of TERMINAL; "GONE" went with its daemon,
    "NEVER" was never begun."""

    transfer: object
    role: str  # SENDER or RECEIVER
    side: int
    state: str = ""
    reason: str = ""
    ended_at: float = 0
    seen_at: float = 0
    joined_at: float = 0
    layers: int = 0
    attempts: int = 0
    # The destination as it was when a receiver said that it had not committed.
    left: object = None

    def __str__(self):
        return f"{self.transfer.name} {self.role.lower()} at {'AB'[self.side]} ({self.state or 'not over'} {self.reason})"


@dataclass
class Record:
    """What the checks are made from."""

    point: object
    halves: dict = field(default_factory=dict)  # (name, role) -> Half
    ordered_at: dict = field(default_factory=dict)  # (name, role) -> when its worker was told
    fired_at: float = 0
    healed_at: float = 0
    hit: bool = False
    dead_daemons: set = field(default_factory=set)
    before: list = field(default_factory=list)  # per side all words of the pool when the point began
    notes: list = field(default_factory=list)
    refinements: dict = field(default_factory=dict)  # name -> refinements.Refined


class Observer:
    """One thread for each half until stop(). look_late: whether destinations of failed transfers are kept, to see late
    writes; not where a look could find a hole in a full disk."""

    def __init__(self, world, record, look_late):
        self._world, self._record, self._look_late = world, record, look_late
        self._stopped = threading.Event()
        self.changed = threading.Condition()
        self._threads = []
        for transfer in record.point.transfers:
            for role, side in (("SENDER", transfer.source), ("RECEIVER", transfer.target)):
                half = record.halves[transfer.name, role] = Half(transfer, role, side)
                self._threads.append(threading.Thread(target=self._follow, args=(half, world.daemons[side].observer), daemon=True))
        for thread in self._threads:
            thread.start()

    def _follow(self, half, client):
        while not self._stopped.is_set() and not half.state:
            try:
                for event in client.watch(half.transfer.name, role=half.role, timeout_s=30):
                    self._note(half, event)
                    if self._stopped.is_set():
                        return
            except skv.SpectrumKVError as error:
                if error.reason == "UNKNOWN_TRANSFER":
                    time.sleep(0.01)
                elif half.side in self._record.dead_daemons or error.code == "CANCELLED":
                    self._over(half, "GONE")
                else:
                    time.sleep(0.02)  # it dies, or is being stopped

    def _note(self, half, event):
        now = time.monotonic()
        with self.changed:
            half.seen_at = half.seen_at or now
            if event.HasField("layers_ready"):
                half.layers = max(half.layers, event.layers_ready.layers)
            if event.HasField("progress") and not half.joined_at:
                if state_name(event.progress.state) in _JOINED:
                    half.joined_at = now
            self.changed.notify_all()
        if event.HasField("terminal"):
            report = event.terminal
            half.reason, half.attempts = report.reason, report.attempts
            state = state_name(report.state)
            if half.role == "RECEIVER" and state != "COMMITTED" and self._look_late:
                half.left = self._world.workers[half.side].cache[:, :, half.transfer.target_blocks].copy()
            self._over(half, state, now)

    def _over(self, half, state, now=None):
        with self.changed:
            if not half.state:
                half.state, half.ended_at = state, now or time.monotonic()
            self.changed.notify_all()

    def _mark_those_that_never_were(self):
        for (name, role), half in self._record.halves.items():
            if half.state or half.seen_at or (name, role) not in self._record.ordered_at:
                continue
            worker = self._world.workers[half.side]
            call = {("SENDER", False): "send", ("SENDER", True): "publish", ("RECEIVER", False): "expect",
                    ("RECEIVER", True): "fetch"}[role, half.transfer.pull]  # fmt: skip
            refused = worker.told(name=name, role=call, event="refused")
            started = worker.told(name=name, role=call, event="started")
            gone = worker.told(event="ended")
            if refused and not started:
                half.reason = refused["reason"] or refused["code"]
                self._over(half, "NEVER")
            elif gone and not started and time.monotonic() - gone["at"] > 0.5:
                self._over(half, "NEVER")
            elif half.side in self._record.dead_daemons and (started or gone):
                self._over(half, "GONE")

    def wait(self, done, timeout_s, look_s=0.05):
        """Until done(), which is looked at whenever a daemon says something, and every look_s; whether it came."""
        end = time.monotonic() + timeout_s
        while True:
            self._mark_those_that_never_were()
            with self.changed:
                if done():
                    return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(min(left, look_s))

    def all_over(self):
        return all(half.state for half in self._record.halves.values())

    def stop(self):
        """No thread touches the record afterwards."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(0.2)


