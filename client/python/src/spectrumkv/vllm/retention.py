"""The prefill side of refinement: where the source of a transfer that has committed is kept, and until when.

The decode worker does not say when it needs it no more. What can be known here is what has been sent since: the source is given
up when all that was coarse has crossed, when a refinement on its way was cancelled or failed, and at last when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from spectrumkv import aio
from spectrumkv.errors import DeadlineExceeded, NotFound, SpectrumKVError
from spectrumkv.policies import tier_name
from spectrumkv.v1 import report_pb2
from spectrumkv.vllm.settle import settle

_log = logging.getLogger("spectrumkv.vllm")
_LOOK_S = 0.25
_LOST = frozenset({
    report_pb2.TRANSFER_STATE_FAILED, report_pb2.TRANSFER_STATE_CANCELLED, report_pb2.TRANSFER_STATE_EXPIRED,
})  # fmt: skip


class Retention:
    """Of one transfer that has committed. Of the loop's thread.

    final: the tier that it is refined to. stop: whether its blocks are wanted back at once. changed: set when that may have
    changed. counted: (event, number).
    """

    def __init__(
        self, client: aio.Client, transfer_id: str, final: str, stop: Callable[[], bool], changed: asyncio.Event,
        counted: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self._client, self._transfer_id, self._final, self._stop, self._changed = client, transfer_id, final, stop, changed
        self._counted = counted
        self._crossed_cells = 0
        self._round = 1

    async def in_blocks(self) -> None:
        """Returns when the daemon reads the source's blocks no more."""
        try:
            while not self._stop() and await self._needed():
                self._changed.clear()
                if not self._stop():
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_S)
        except SpectrumKVError as error:
            _log.warning("%s: its source is kept no longer: %s", self._transfer_id, error)
        await settle(self._client.release, self._transfer_id, "SENDER")

    async def in_daemon(self) -> None:
        """As in_blocks, but at once: the daemon makes a copy for refinements. One that has no room for it keeps nothing."""
        try:
            base = await self._client.get_transfer(self._transfer_id, role="SENDER")
            if not await _release_but_keep(self._client, self._transfer_id) and base.retained_seconds > 0:
                self._counted("retentions_refused", 1)
        except SpectrumKVError as error:
            _log.warning("%s: the daemon does not say whether it keeps a copy: %s", self._transfer_id, error)
            await settle(self._client.release, self._transfer_id, "SENDER")

    async def _needed(self) -> bool:
        try:
            base = await self._client.get_transfer(self._transfer_id, role="SENDER")
            if base.retained_seconds <= 0 or await self._lost_a_round():
                return False
        except DeadlineExceeded:  # a daemon that stands still may go on
            return True
        return self._crossed_cells < coarse_cells(base, self._final)

    async def _lost_a_round(self) -> bool:
        """Counts what rounds have brought, each cell once; whether one has ended otherwise, for then no other follows."""
        while True:
            try:
                report = await self._client.get_transfer(f"{self._transfer_id}.refine-{self._round}", role="SENDER")
            except NotFound:  # it has not begun
                return False
            if report.state != report_pb2.TRANSFER_STATE_COMMITTED:
                return report.state in _LOST
            self._crossed_cells += sum(count.k_tokens + count.v_tokens for count in report.tiers)
            self._round += 1


async def _release_but_keep(client: aio.Client, transfer_id: str) -> bool:
    """Whether the daemon has a copy now; the blocks are given back anyhow."""
    return bool(await client.release(transfer_id, role="SENDER", keep_in_cache=True))


def coarse_cells(report: report_pb2.TransferReport, final: str) -> int:
    """Of a transfer's cells (a token of K or of V of one layer), those that a refinement to this tier would bring."""
    fine = {"RAW", final}
    return sum(count.k_tokens + count.v_tokens for count in report.tiers if tier_name(count.tier) not in fine)
