"""The decode side of refinement: what comes after a load has committed, and when it is written into the cache.

Cells wait in the daemon (STAGED, never DIRECT). Only Refinements.apply writes, and only for requests that are here; one that loses
its blocks is taken out by Refinements.end. So the rule that no byte lands in another request's block is one of order: the step
that gives a block to another request tells of it, and in every step `end` comes before `apply`, and both before anything is
computed (WorkerSide.preempt, then begin).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spectrumkv import aio, reasons
from spectrumkv.errors import NotFound, TransferFailed
from spectrumkv.vllm.retention import coarse_cells
from spectrumkv.vllm.settle import settle

_log = logging.getLogger("spectrumkv.vllm")
# A chunk has at most so many bytes, and a call brings at least one.
_LARGEST_CHUNK = 1 << 20
# Within how long the daemon begins a round by itself, and how often it is asked.
_BEGIN_S = 5.0
_LOOK_S, _LOOK_SELDOM_S = 0.01, 0.5
# For how long a transfer that needs no refinement any more is not forgotten: its time to first token may be reported yet.
_FIRST_TOKEN_S = 5.0


@dataclass
class _Coming:
    """The refinement of one request. staged: there may be cells to apply. counted_bytes: applied in this round. in_place: all
    of it is. over: nothing comes any more. kept: the daemon has it for refinements, until it is released."""

    transfer_id: str
    refine_id: str = ""
    counted_bytes: int = 0
    staged: bool = False
    over: bool = False
    kept: bool = True
    in_place: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Refinements:
    """All of the loop's thread, but `ready`.

    patient: a client without a time limit, for calls that write: one that was given up could still be heard. final: the tier that
    all is to have. counted: (event, number). ready: whether apply may find something.
    """

    def __init__(self, client: aio.Client, patient: aio.Client, final: str, counted: Callable[[str, int], None]) -> None:
        self._client, self._patient, self._final, self._counted = client, patient, final, counted
        self._coming: dict[str, _Coming] = {}
        self._applying = asyncio.Lock()
        self.ready = False

    def begin(self, request_id: str, transfer_id: str) -> None:
        """The request's KV has arrived, and its blocks may be refined until end()."""
        coming = self._coming[request_id] = _Coming(transfer_id)
        coming.task = asyncio.create_task(self._follow(request_id, coming))

    async def end(self, request_id: str) -> None:
        """From the first moment on nothing more is applied to the request's blocks. When it returns, none is written: what was
        on its way has been answered, and the daemon has let go of them."""
        coming = self._coming.pop(request_id, None)
        if coming is None:
            return
        if coming.task is not None:
            coming.task.cancel()
        if not coming.over:
            self._counted("refinements_ended", 1)
        async with self._applying:
            pass
        if coming.kept:
            await self.release(coming.transfer_id)

    async def release(self, transfer_id: str) -> None:
        await settle(self._client.release, transfer_id, "RECEIVER")

    async def apply(self, max_bytes: int, until_s: float) -> None:
        """Writes what has arrived, at most max_bytes, but at least a chunk. No call is made after until_s (of time.monotonic)."""
        left = max_bytes
        async with self._applying:
            self.ready = False
            for request_id, coming in list(self._coming.items()):
                if self._coming.get(request_id) is not coming or not coming.staged:
                    continue
                if left < min(max_bytes, _LARGEST_CHUNK) or time.monotonic() > until_s:
                    break
                left -= await self._apply(request_id, coming, left)
            self.ready |= any(coming.staged for coming in self._coming.values())

    async def _apply(self, request_id: str, coming: _Coming, max_bytes: int) -> int:
        """How many bytes."""
        coming.staged = False
        try:
            answer = await self._patient.apply_refinement(coming.refine_id, max_bytes=max_bytes)
        except reasons.BLOCKS_IN_USE:  # somebody reads them: the next step tries again
            coming.staged = True
            return 0
        except reasons.REFINEMENT_DROPPED:  # the round has failed, and whoever waits for it hears why
            return 0
        except reasons.NOT_EXACT:
            # All is in place. vLLM computes the prompt's last token itself, so that it need not be the sender's.
            coming.in_place.set()
            return max_bytes
        except Exception as error:  # noqa: BLE001: the request goes on with what it has
            self._failed(request_id, coming, error)
            return 0
        coming.staged |= answer.staged_bytes > 0
        if answer.complete:
            coming.in_place.set()
        self._count_bytes(coming, coming.counted_bytes + answer.applied_bytes)
        return int(answer.applied_bytes)

    def _count_bytes(self, coming: _Coming, applied_bytes: int) -> None:
        if applied_bytes > coming.counted_bytes:
            self._counted("refined_bytes", applied_bytes - coming.counted_bytes)
        coming.counted_bytes = applied_bytes

    # ---- rounds ----------------------------------------------------------------------------------------------------

    async def _follow(self, request_id: str, coming: _Coming) -> None:
        try:
            await self._rounds(coming)
        except Exception as error:  # noqa: BLE001: the request goes on with what it has
            self._failed(request_id, coming, error)
        coming.over, coming.staged = True, False
        if coming.kept:
            await asyncio.sleep(_FIRST_TOKEN_S)
        if self._coming.get(request_id) is coming:
            del self._coming[request_id]
            if coming.kept:
                await self.release(coming.transfer_id)

    async def _rounds(self, coming: _Coming) -> None:
        base = await self._client.get_transfer(coming.transfer_id, role="RECEIVER")
        coming.kept = base.retained_seconds > 0
        if not coming.kept or coarse_cells(base, self._final) == 0:
            return
        for number in itertools.count(1):
            coming.refine_id = f"{coming.transfer_id}.refine-{number}"
            if not await self._begun(coming.refine_id):
                self._counted("refinements_missing", 1)
                return
            cells_left = await self._round(coming)
            if coming.over:  # it could not be applied
                return
            if cells_left == 0:
                self._counted("refinements_complete", 1)
                return
            coming.counted_bytes, coming.staged = 0, False
            coming.in_place.clear()

    async def _round(self, coming: _Coming) -> int:
        """How many cells are left for the next."""
        try:
            await self._client.wait(coming.refine_id, role="RECEIVER", on_progress=lambda _: self._arrived(coming))
        except TransferFailed as error:
            if error.reason != "SOURCE_MOVED":
                raise
            return 1  # this daemon asks for the rest by itself
        self._arrived(coming)
        await coming.in_place.wait()
        report = await self._client.get_transfer(coming.refine_id, role="RECEIVER")
        self._count_bytes(coming, report.applied_bytes)
        return int(report.cells_left)

    def _arrived(self, coming: _Coming) -> None:
        if not coming.in_place.is_set():
            coming.staged = self.ready = True

    async def _begun(self, refine_id: str) -> bool:
        """Whether the daemon has begun this round; it does not where there is nothing to gain, or no room."""
        give_up, pause_s = time.monotonic() + _BEGIN_S, _LOOK_S
        while time.monotonic() < give_up:
            try:
                await self._client.get_transfer(refine_id, role="RECEIVER")
                return True
            except NotFound:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_SELDOM_S)
        return False

    def _failed(self, request_id: str, coming: _Coming, error: Exception) -> None:
        """What has arrived stays valid, with what was applied."""
        if not coming.over:
            coming.over = True
            self._counted("refinements_failed", 1)
            _log.warning("request %s: its KV gets no better: %s", request_id, error)
        coming.in_place.set()
