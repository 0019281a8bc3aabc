"""Talks to the daemon on a thread with an event loop, for any number of transfers at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from spectrumkv import aio, reasons
from spectrumkv.errors import SpectrumKVError, TransferFailed
from spectrumkv.policies import tier_name
from spectrumkv.pools import Pool
from spectrumkv.v1 import policy_pb2
from spectrumkv.vllm.refinements import Refinements
from spectrumkv.vllm.retention import Retention
from spectrumkv.vllm.settings import Settings
from spectrumkv.vllm.settle import refused, settle
from spectrumkv.vllm.steps import LoadStart, SendStart, part_name

_log = logging.getLogger("spectrumkv.vllm")
_CALL_S = 10.0
# For how long a call that the daemon has no room for is made again.
_RETRY_S = 10.0
# For how long a daemon that cannot be reached is taken for one that is restarting, and how often it is tried.
_RECONNECT_S = 5.0
_RECONNECT_PAUSE_S = 0.1
# The least budget is told in six digits.
_ROUNDED_UP = 1.00001


class Outgoing:
    """A prompt on its way. vLLM's thread says what is written; the courier's thread tells the daemon.

    ended: called once, on the courier's thread, with why it failed or "". counted: something to be counted. queries: of layers, by their
    places; they are given when the layer is written.
    """

    def __init__(
        self, start: SendStart, layers: int, ended: Callable[[str], None], counted: Callable[[str], None]
    ) -> None:
        self.start, self.layers, self.ended, self.counted = start, layers, ended, counted
        self.written = 0  # an int is read and written as a whole
        self.policy = None if start.policy is None else policy_pb2.Policy.FromString(start.policy)
        self.wants_queries = False
        self.queries: list[tuple[int, policy_pb2.RecentQueries]] = []
        self.rows: tuple[int, int] | None = None
        self.transfer_id = ""
        # Of the loop's thread:
        self.changed = asyncio.Event()
        self.opened = False
        self.answered = asyncio.Event()  # whether the daemon has it is known
        self.over = asyncio.Event()
        self.cancelled = False

    def want_queries(self) -> None:
        """Has the daemon weigh tokens by the last queries, where they make a difference and nobody asked for something else."""
        policy = policy_pb2.Policy() if self.policy is None else self.policy
        importance = policy.importance
        if policy.allocator != policy_pb2.ALLOCATOR_RAW and not importance.source and not importance.scores:
            importance.source = policy_pb2.IMPORTANCE_SOURCE_RECENT_QUERIES
            self.policy, self.wants_queries = policy, True

    def layers_written(self, layers: int) -> None:
        self.written = max(self.written, layers)


@dataclass
class _Incoming:
    """A load. opened: the daemon has said that it has it. unwanted: nobody looks into the blocks any more."""

    name: str
    opened: bool
    unwanted: bool = False


class Courier:
    """One thread, one connection. Methods are for other threads; close() ends what is under way.

    counted: what is counted of refinements, (event, number); set before the first load.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.counted: Callable[[str, int], None] = lambda _event, _number: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="spectrumkv-courier", daemon=True)
        self._thread.start()
        self.client: aio.Client = self._submit(self._connect(_CALL_S, _RETRY_S)).result()
        self.refinements: Refinements | None = None
        if settings.refine:
            self._patient: aio.Client = self._submit(self._connect(None, 0.0)).result()
            self.refinements = Refinements(
                self.client, self._patient, settings.refine, lambda event, number: self.counted(event, number)
            )
        self._loads: dict[str, _Incoming] = {}  # by request; of the loop's thread

    async def _connect(self, timeout_s: float | None, retry_s: float) -> aio.Client:
        token_file = self._settings.token_file
        return aio.Client(self._settings.daemon, timeout_s=timeout_s, retry_s=retry_s, token_file=token_file)

    def _submit(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def send(self, outgoing: Outgoing, pool: Pool, rank: int, size: int) -> None:
        outgoing.transfer_id = part_name(outgoing.start.transfer_id, rank, size)
        self._submit(self._send(outgoing, pool))

    def wake(self, outgoings: Sequence[Outgoing]) -> None:
        """More of these is written."""
        for outgoing in outgoings:
            self._loop.call_soon_threadsafe(outgoing.changed.set)

    def cancel_send(self, outgoing: Outgoing) -> concurrent.futures.Future[None]:
        """The future is done when no block is read any more."""
        return self._submit(self._cancel_send(outgoing))

    async def _cancel_send(self, outgoing: Outgoing) -> None:
        outgoing.cancelled = True
        outgoing.changed.set()
        # Not by its id alone: where the daemon has not taken ours, a transfer of that id is another's.
        await outgoing.answered.wait()
        if outgoing.opened and not outgoing.over.is_set():
            await settle(self.client.cancel, outgoing.transfer_id, "SENDER")
        await outgoing.over.wait()

    async def _send(self, outgoing: Outgoing, pool: Pool) -> None:
        why = ""
        try:
            await self._open_send(outgoing, pool)
            await self._advance(outgoing)
            if outgoing.cancelled:
                await settle(self.client.cancel, outgoing.transfer_id, "SENDER")
            await self.client.wait(outgoing.transfer_id, role="SENDER")
            await self._retain(outgoing)
        except TransferFailed as error:
            why = str(error)
        except SpectrumKVError as error:
            why = str(error)
            if outgoing.opened or not refused(error):
                await self._let_go(outgoing.transfer_id, "SENDER")
        except Exception as error:  # noqa: BLE001: whatever it was, the blocks must be given back
            why = repr(error)
            _log.exception("sending %s", outgoing.transfer_id)
            await self._let_go(outgoing.transfer_id, "SENDER")
        if why:
            _log.warning("request %s: its KV was not sent: %s", outgoing.start.request_id, why)
        outgoing.answered.set()
        outgoing.over.set()
        outgoing.ended(why)

    async def _retain(self, outgoing: Outgoing) -> None:
        """Returns when the source is not needed for refinements any more."""
        if outgoing.policy is None or outgoing.policy.retain_seconds <= 0:
            return
        tier = tier_name(outgoing.policy.refine.final)
        retention = Retention(
            self.client, outgoing.transfer_id, tier, lambda: outgoing.cancelled, outgoing.changed, self.counted
        )
        await (retention.in_daemon() if self._settings.retain_in == "daemon" else retention.in_blocks())

    async def _open_send(self, outgoing: Outgoing, pool: Pool) -> None:
        start, policy = outgoing.start, outgoing.policy
        rest: dict[str, Any] = {
            "pool": pool, "token_count": start.token_count, "blocks": start.blocks, "policy": policy, "token": start.token,
            "deadline_ms": self._settings.deadline_ms, "layerwise": True,
        }  # fmt: skip
        try:
            await self._send_or_publish(outgoing, rest)
        except reasons.BUDGET_TOO_SMALL as error:
            # A short prompt has more to say of its chunks than it has values to save. What is configured for long ones must not
            # have it computed twice.
            if policy is None or policy.strict_budget:
                raise
            policy.budget = float(error.metadata["least_budget"]) * _ROUNDED_UP
            outgoing.counted("budgets_raised")
            await self._send_or_publish(outgoing, rest)
        outgoing.opened = True
        outgoing.answered.set()
        # What earlier steps computed can leave before this one's first layer; but then it is planned without the queries.
        if start.computed > 0 and not outgoing.cancelled and not outgoing.wants_queries:
            await self.client.advance(outgoing.transfer_id, layers=outgoing.layers, tokens=start.computed)

    async def _send_or_publish(self, outgoing: Outgoing, rest: dict[str, Any]) -> None:
        if outgoing.start.peer:
            rest = {**rest, "peer": outgoing.start.peer}
        await _reach(self.client.send if outgoing.start.peer else self.client.publish, outgoing.transfer_id, rest)

    async def _advance(self, outgoing: Outgoing) -> None:
        """Tells of layers as they are written; several at once where they come quicker than they can be told."""
        told = 0
        while told < outgoing.layers and not outgoing.cancelled:
            await outgoing.changed.wait()
            outgoing.changed.clear()
            written = outgoing.written
            while outgoing.queries and outgoing.queries[0][0] < written and not outgoing.cancelled:
                place, queries = outgoing.queries.pop(0)
                told = max(told, place + 1)
                await self._advance_to(outgoing, told, queries)
            if written > told and not outgoing.cancelled:
                await self._advance_to(outgoing, written, None)
                told = written

    async def _advance_to(self, outgoing: Outgoing, layers: int, queries: policy_pb2.RecentQueries | None) -> None:
        tokens = outgoing.start.token_count
        await self.client.advance(outgoing.transfer_id, layers=layers, tokens=tokens, queries=queries)

    # ---- receiving -------------------------------------------------------------------------------------------------

    def receive(
        self, load: LoadStart, pool: Pool, rank: int, size: int, ended: Callable[[str], None]
    ) -> concurrent.futures.Future[None]:
        """ended: as in Outgoing; what failed because nobody wanted it any more is told as "", for nobody looks into the
        blocks."""
        return self._submit(self._receive(load, pool, rank, size, ended))

    def cancel_load(self, request_id: str) -> None:
        self._submit(self._cancel_load(request_id))

    async def _cancel_load(self, request_id: str) -> None:
        incoming = self._loads.get(request_id)
        if incoming is not None:
            incoming.unwanted = True
            if incoming.opened:  # otherwise _receive cancels it when the daemon has taken it: by its id it may be another's
                await settle(self.client.cancel, incoming.name, "RECEIVER")

    async def _receive(self, load: LoadStart, pool: Pool, rank: int, size: int, ended: Callable[[str], None]) -> None:
        name = part_name(load.transfer_id, rank, size)
        incoming = self._loads[load.request_id] = _Incoming(name, rank < len(load.opened) and load.opened[rank])
        why = load.failed
        try:
            if not why:
                if not incoming.opened:
                    await self._open_load(load, name, pool)
                    incoming.opened = True
                if incoming.unwanted:
                    await settle(self.client.cancel, name, "RECEIVER")
                await self.client.wait(name, role="RECEIVER")
        except TransferFailed as error:
            why = str(error)
        except SpectrumKVError as error:
            why = str(error)
            if incoming.opened or not refused(error) or (rank in load.unanswered and error.code != "ALREADY_EXISTS"):
                await self._let_go(name, "RECEIVER")
        except Exception as error:  # noqa: BLE001: whatever it was, vLLM must hear an end
            why = repr(error)
            _log.exception("receiving %s", name)
            await self._let_go(name, "RECEIVER")
        if load.failed and incoming.opened:
            await self._let_go(name, "RECEIVER")  # it was another rank's that was refused
        if self.refinements is not None and not why:
            if incoming.unwanted:
                await self.refinements.release(name)
            else:
                self.refinements.begin(load.request_id, name)
        del self._loads[load.request_id]
        if why and not incoming.unwanted:
            _log.warning("request %s: its KV did not come: %s", load.request_id, why)
        ended("" if incoming.unwanted else why)

    async def _open_load(self, load: LoadStart, name: str, pool: Pool) -> None:
        rest: dict[str, Any] = {
            "pool": pool, "token_count": load.token_count, "blocks": load.blocks, "token": load.token,
            "deadline_ms": self._settings.deadline_ms, "refinable": self.refinements is not None,
        }  # fmt: skip
        if load.peer:
            rest["peer"] = load.peer
        await _reach(self.client.fetch if load.peer else self.client.expect, name, rest)

    # ---- refinement ------------------------------------------------------------------------------------------------

    def apply_refinements(self, max_bytes: int, until_s: float) -> concurrent.futures.Future[None]:
        """As Refinements.apply. REQUIRES: refinements."""
        assert self.refinements is not None
        return self._submit(self.refinements.apply(max_bytes, until_s))

    def end_refinement(self, request_id: str) -> concurrent.futures.Future[None]:
        """From the next apply_refinements on the request's blocks are left alone, also where its load is still on its way. The
        future is done when nothing that was begun before writes into them. REQUIRES: refinements."""
        return self._submit(self._end_refinement(request_id))

    async def _end_refinement(self, request_id: str) -> None:
        assert self.refinements is not None
        if request_id in self._loads:
            self._loads[request_id].unwanted = True
        await self.refinements.end(request_id)

    # ---- ends ------------------------------------------------------------------------------------------------------

    async def _let_go(self, transfer_id: str, role: str) -> None:
        """Returns when the daemon touches no block of the transfer any more, even if it had committed and was kept."""
        await settle(self.client.cancel, transfer_id, role)
        if self.refinements is not None:
            await settle(self.client.release, transfer_id, role)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._submit(self._stop()).result(_CALL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self.refinements is not None:
            await self._patient.close()


def unreachable(error: SpectrumKVError) -> bool:
    """Whether no daemon spoke."""
    return error.code == "UNAVAILABLE" and not error.reason


async def _reach(call: Callable[..., Awaitable[None]], transfer_id: str, arguments: dict[str, Any]) -> None:
    """Calls, and again for a while where the daemon cannot be reached: a restart must not cost the other half its deadline."""
    give_up = time.monotonic() + _RECONNECT_S
    while True:
        try:
            return await call(transfer_id, **arguments)
        except SpectrumKVError as error:
            if not unreachable(error) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(_RECONNECT_PAUSE_S)
