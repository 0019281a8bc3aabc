"""Calls that must be answered, for until then the daemon may read or write blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from spectrumkv.errors import SpectrumKVError

_log = logging.getLogger("spectrumkv.vllm")
# A call that the daemon does not answer is made again: until it answers, it may write into the blocks.
_ASK_AGAIN_S = 1.0
# A daemon that says one of these touches nothing of the transfer any more: it is gone, or does not know it.
_OVER = frozenset({"UNAVAILABLE", "NOT_FOUND", "FAILED_PRECONDITION", "CANCELLED"})


async def settle(call: Callable[..., Awaitable[Any]], transfer_id: str, role: str) -> None:
    """call: of a client, its cancel or release. Returns when the daemon has answered it, or is gone."""
    while True:
        try:
            await call(transfer_id, role=role)
            return
        except SpectrumKVError as error:
            if error.code in _OVER:
                return
            _log.warning("%s: %s of it is not answered: %s", transfer_id, call.__name__, error)
        await asyncio.sleep(_ASK_AGAIN_S)
