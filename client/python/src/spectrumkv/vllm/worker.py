"""The connector beside the model: sends what is computed layer by layer, receives into blocks, and says when either ended.

Imports nothing of vLLM. vLLM's thread calls; what talks to the daemon runs on a thread with an event loop (courier.py), so that
the computation never waits for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from spectrumkv.errors import SpectrumKVError
from spectrumkv.pools import Pool
from spectrumkv.vllm.courier import Courier, Outgoing
from spectrumkv.vllm.steps import Step

_log = logging.getLogger("spectrumkv.vllm")
# How long the end of what a preempted request has under way may hold up the step that takes its blocks away.
_CANCEL_S = 30.0
# How long a step waits for the daemon to write refined cells.
_APPLY_S = 1.0
_CLOSE_MS = 1000


class WorkerSide:
    """pool: the cache at the daemon; its groups' layers in all are what advance counts.

    layer_places: for each of vLLM's layer names, its place among the pool's layers, from 0. refine_step_bytes: where the courier
    has refinements, how much of them a step may apply.
    """

    def __init__(
        self, pool: Pool, courier: Courier, layer_places: Mapping[str, int], *, rank: int = 0, size: int = 1,
        idle_wait_s: float = 0.002, refine_step_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._courier, self._places, self._idle_wait_s = courier, dict(layer_places), idle_wait_s
        self._layers = len(set(self._places.values()))
        self.rank, self.size, self.pool = rank, size, pool
        self.captures_queries = False  # somebody adds to Outgoing.queries before layer_written
        self._ended = threading.Condition()
        # Under the condition:
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self.counts: Counter[str] = Counter()
        # Of vLLM's thread alone:
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Future[None]] = {}
        self._released: set[str] = set()
        self._step = Step()
        self._now: list[Outgoing] = []  # those that are computed in this step
        self._refine_step_bytes = refine_step_bytes
        self._applying: Future[None] | None = None
        courier.counted = self._count

    def preempt(self, step: Step) -> None:
        """Before anything of the step is applied or computed. Returns when no block of those senders is read any more, and no
        block that the step may have given to others is refined any more. Raises TimeoutError after a while."""
        if self._courier.refinements is not None:
            self._end_refinements(step)
        for request_id in step.preempted:
            outgoing = self._outgoing.pop(request_id, None)
            if outgoing is not None:
                self._courier.cancel_send(outgoing).result(_CANCEL_S)
                with self._ended:
                    self._sent.discard(request_id)

    def _end_refinements(self, step: Step) -> None:
        taken = [self._courier.end_refinement(request_id) for request_id in step.cancels]
        for request_id in step.ended:
            ended = self._courier.end_refinement(request_id)
            if request_id in step.released:  # vLLM keeps the blocks until we say so
                ended.add_done_callback(functools.partial(self._given_back, request_id))
            else:
                taken.append(ended)
        for ended in taken:
            ended.result(_CANCEL_S)

    def _given_back(self, request_id: str, _ended: Future[None]) -> None:
        with self._ended:
            self._sent.add(request_id)
            self._ended.notify_all()

    def begin(self, step: Step) -> None:
        """Before the step's computation."""
        self._step = step
        self._now = []
        self._apply_refinements()
        for send in step.sends:
            outgoing = Outgoing(send, self._layers, functools.partial(self._send_ended, send.request_id), self._count)
            if self.captures_queries:
                outgoing.want_queries()
            self._outgoing[send.request_id] = outgoing
            self._now.append(outgoing)
            self._courier.send(outgoing, self.pool, self.rank, self.size)
        for load in step.loads:
            ended = functools.partial(self._load_ended, load.request_id, load.blocks)
            self._incoming[load.request_id] = self._courier.receive(load, self.pool, self.rank, self.size, ended)
        self._released.update(step.released)
        for request_id in step.cancels:
            if request_id in self._outgoing:
                self._courier.cancel_send(self._outgoing[request_id])
            if request_id in self._incoming:
                self._courier.cancel_load(request_id)

    def _apply_refinements(self) -> None:
        """Nobody reads the cache now. Requests that this step has taken blocks from were ended in preempt()."""
        refinements = self._courier.refinements
        if refinements is None or not refinements.ready or (self._applying is not None and not self._applying.done()):
            return
        self._applying = self._courier.apply_refinements(self._refine_step_bytes, time.monotonic() + _APPLY_S)
        try:
            self._applying.result(_APPLY_S)
        except concurrent.futures.TimeoutError:
            # The daemon stands still. What it writes later is better than what is there; whoever takes the blocks waits for it.
            self._count("refinements_late")
            _log.warning("the daemon takes more than %g s to apply a refinement", _APPLY_S)

    @property
    def sends_now(self) -> Sequence[Outgoing]:
        """What this step computes the last tokens of."""
        return self._now

    def layer_written(self, layer_name: str) -> None:
        """The layer's KV of all tokens of this step is in the cache, and that of the layers before it."""
        if self._now:
            place = self._places.get(layer_name)
            if place is not None:
                self._written(place + 1)

    def step_written(self) -> None:
        """All layers are in the cache."""
        if self._now:
            self._written(self._layers)
            self._now = []

    def _written(self, layers: int) -> None:
        for outgoing in self._now:
            outgoing.layers_written(layers)
        self._courier.wake(self._now)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """(sent, received) of requests that have ended since the last call. Those whose blocks vLLM does not keep for us are
        not told as sent. Waits a little where vLLM has nothing else to do."""
        with self._ended:
            nothing = not self._received and not self._sent & self._released
            if nothing and self._step.idle and (self._incoming or self._released):
                self._ended.wait(self._idle_wait_s)
            sent = self._sent & self._released
            self._sent -= sent
            received, self._received = self._received, set()
        self._released -= sent
        for name in sent:
            self._outgoing.pop(name, None)
        for name in received:
            self._incoming.pop(name, None)
        return sent, received

    def take_failed_blocks(self) -> set[int]:
        with self._ended:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_counts(self) -> Mapping[str, int]:
        with self._ended:
            counts, self.counts = self.counts, Counter()
        return counts

    def close(self) -> None:
        try:
            with contextlib.suppress(SpectrumKVError):  # what is under way ends with the connection
                self.pool.close(_CLOSE_MS)
        finally:
            self._courier.close()

    def _count(self, what: str, number: int = 1) -> None:
        with self._ended:
            self.counts[what] += number

    def _send_ended(self, request_id: str, failed: str) -> None:
        with self._ended:
            self._sent.add(request_id)
            self.counts["sends_failed" if failed else "sends_committed"] += 1
            self._ended.notify_all()

    def _load_ended(self, request_id: str, blocks: Sequence[int], failed: str) -> None:
        with self._ended:
            self._received.add(request_id)
            if failed:
                self._failed_blocks.update(blocks)
            self.counts["loads_failed" if failed else "loads_committed"] += 1
            self._ended.notify_all()
