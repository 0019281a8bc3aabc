"""Which answers end a call that must be answered."""

import asyncio

import pytest

from spectrumkv.errors import _CODES, SpectrumKVError
from spectrumkv.vllm import settle as settling

# Those after which the daemon may still write: it has not answered, or not about the transfer.
ASKED_AGAIN = {
    "UNKNOWN", "DEADLINE_EXCEEDED", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "ABORTED", "OUT_OF_RANGE", "INTERNAL", "DATA_LOSS",
    "UNAUTHENTICATED",
}  # fmt: skip


@pytest.mark.parametrize("code", _CODES)
def test_a_definite_answer_ends_it(code, monkeypatch):
    monkeypatch.setattr(settling, "_ASK_AGAIN_S", 0.001)
    asked = []

    async def cancel(transfer_id, role):
        asked.append((transfer_id, role))
        if len(asked) < 3:
            raise SpectrumKVError(code, "", "")

    asyncio.run(asyncio.wait_for(settling.settle(cancel, "t", "SENDER"), 20))
    assert asked == [("t", "SENDER")] * (3 if code in ASKED_AGAIN else 1)


@pytest.mark.parametrize("code", _CODES)
def test_what_a_daemon_has_not_said_may_have_been_heard(code):
    """With a reason the daemon spoke; without one only those that stand before its service say that nothing was begun."""
    assert settling.refused(SpectrumKVError(code, "A_REASON", ""))
    expected = code in {"INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"}
    assert settling.refused(SpectrumKVError(code, "", "")) == expected
