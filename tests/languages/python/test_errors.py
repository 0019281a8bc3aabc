"""Exceptions by code and by reason."""

import pathlib
import pickle
import re

import grpc
import pytest

import spectrumkv as skv
from spectrumkv.errors import _CODES, _REASONS
from spectrumkv.v1 import report_pb2

SERVER = pathlib.Path(__file__).resolve().parents[3] / "server"
# Names of this form in the server that no worker ever gets as the reason of an error.
ELSEWHERE = {
    "at its start": "CONFIG_FILE INVALID_CONFIG INVALID_FLAG INVALID_LOG_FORMAT INVALID_SOCKET_PATH LISTEN_FAILED READY_FILE"
    " SELF_TEST_FAILED SOCKET_IN_USE SOCKET_PATH SPECTRUMKV_CONFIG SPECTRUMKV_PEER_IDENTITY SPECTRUMKV_PEER_TLS_CA_FILE"
    " TLS_FILE_INVALID TLS_FILE_UNREADABLE TLS_MEMORY TOKEN_FILE BACKEND_UNAVAILABLE",
    "names of policies": "KEY_NORM RECENT_QUERIES SINK_PROTECT SLIDING_WINDOW_SINK TWO_TIER",
    "why no time is predicted": "LINK_UNKNOWN NO_LINK_ASKED STAGE_UNKNOWN",
    "profiles of models": "INVALID_PROFILE",
    "to operators": "DRAIN_TIMEOUT",
}  # fmt: skip


def test_an_error_is_of_its_code_and_of_its_reason():
    error = skv.SpectrumKVError("NOT_FOUND", "UNKNOWN_POOL", "no pool", {"pool": "x"}, 250)
    for kind in (skv.reasons.UNKNOWN_POOL, skv.NotFound, skv.SpectrumKVError):
        with pytest.raises(kind) as raised:
            raise error
        assert raised.value is error
    assert not isinstance(error, (skv.reasons.STALE_EPOCH, skv.Unavailable, skv.TransferFailed))
    assert (error.code, error.reason, error.metadata, error.retry_after_ms) == ("NOT_FOUND", "UNKNOWN_POOL", {"pool": "x"}, 250)
    assert str(error) == "NOT_FOUND UNKNOWN_POOL: no pool (pool=x)"


def test_the_end_of_a_transfer_is_too():
    report = report_pb2.TransferReport(code=14, reason="PEER_SILENT", message="nothing came", transfer_id="t")
    error = skv.TransferFailed(report)
    assert isinstance(error, skv.reasons.PEER_SILENT) and isinstance(error, skv.Unavailable)
    assert error.report is report and error.metadata == {"transfer_id": "t"}
    assert type(skv.TransferFailed(report)) is type(error)  # classes are made once


@pytest.mark.parametrize("code, reason, kind", [
    ("UNAVAILABLE", "", skv.Unavailable),
    ("NOT_FOUND", "A_REASON_OF_LATER", skv.NotFound),
    ("A_CODE_OF_LATER", "STALE_EPOCH", skv.reasons.STALE_EPOCH),
    ("A_CODE_OF_LATER", "A_REASON_OF_LATER", skv.SpectrumKVError),
])  # fmt: skip
def test_what_is_not_known_is_told_all_the_same(code, reason, kind):
    error = skv.SpectrumKVError(code, reason, "words")
    assert type(error) is kind and (error.code, error.reason) == (code, reason)


def test_errors_pass_between_processes():
    for error in (skv.SpectrumKVError("ABORTED", "SUPERSEDED", "words", {"a": "b"}, 3),
                  skv.TransferFailed(report_pb2.TransferReport(code=9, reason="SOURCE_CHANGED", transfer_id="t"))):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)
        assert (copy.code, copy.reason, copy.metadata) == (error.code, error.reason, error.metadata)
        assert copy.retry_after_ms == error.retry_after_ms


def test_every_code_has_a_class():
    assert set(_CODES) == {code.name for code in grpc.StatusCode} - {"OK"}


def test_every_reason_of_the_daemon_has_a_class():
    """A new reason that a worker may get needs a class in reasons.py; any other name belongs into ELSEWHERE."""
    told = set()
    for path in [*SERVER.rglob("*.cc"), *SERVER.rglob("*.h")]:
        told |= set(re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"', path.read_text()))
    told -= {name for names in ELSEWHERE.values() for name in names.split()}
    assert len(told) > 90, "the server writes its reasons in another way now: this test proves nothing"
    assert sorted(told - set(_REASONS)) == []
    one_word = {name for name in _REASONS if "_" not in name}
    assert sorted(set(_REASONS) - told - one_word) == [], "no daemon gives these any more"
    assert all(kind.__doc__ for kind in _REASONS.values())
