"""Calls that must be answered, for until then the daemon may read or write blocks; and which answers say that it does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from spectrumkv.errors import SpectrumKVError

_log = logging.getLogger("spectrumkv.vllm")
# A call that the daemon does not answer is made again: until it answers, it may write into the blocks.
_ASK_AGAIN_S = 1.0
# A daemon that says one of these touches nothing of the transfer any more: it is gone, does not know it, never took such a one, or
# has one of another user by that name. Asked again it says the same. Not UNAUTHENTICATED: it may have taken the transfer before it
# took another token.
_OVER = frozenset({
    "UNAVAILABLE", "NOT_FOUND", "FAILED_PRECONDITION", "CANCELLED", "INVALID_ARGUMENT", "PERMISSION_DENIED", "UNIMPLEMENTED",
})  # fmt: skip
# Said without a reason by what stands before the daemon's service.
_NOT_LET_IN = frozenset({"INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"})


def refused(error: SpectrumKVError) -> bool:
    """Of a call that opens a transfer: whether the daemon has answered that it does not. Nothing of ours is there then, and a
    transfer of that id, which is another's (ALREADY_EXISTS, and whatever is looked at before the id), must not be cancelled."""
    return bool(error.reason) or error.code in _NOT_LET_IN


async def settle(call: Callable[..., Awaitable[Any]], transfer_id: str, role: str) -> None:
    """call: of a client, its cancel or release. Returns when the daemon has answered it, or is gone. Only for what the daemon has
    opened, or may have (`refused`)."""
    while True:
        try:
            await call(transfer_id, role=role)
            return
        except SpectrumKVError as error:
            if error.code in _OVER:
                return
            _log.warning("%s: %s of it is not answered: %s", transfer_id, call.__name__, error)
        await asyncio.sleep(_ASK_AGAIN_S)
