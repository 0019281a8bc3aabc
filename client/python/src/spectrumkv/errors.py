"""What can go wrong, and trying again."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from spectrumkv.v1 import report_pb2

T = TypeVar("T")
_STATUS_KEY = "grpc-status-details-bin"


class SpectrumKVError(Exception):
    """A call that the daemon refused, or that did not reach it.

    code: name of the google.rpc.Code, for example "NOT_FOUND".
    reason: the daemon's stable UPPER_SNAKE reason, for example "UNKNOWN_POOL"; "" where no daemon spoke.
    metadata: the offending values, as strings.
    retry_after_ms: when to try again; None where the daemon does not say that trying again helps.
    """

    def __init__(
        self, code: str, reason: str, message: str, metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:  # fmt: skip
        values = ", ".join(f"{key}={value}" for key, value in (metadata or {}).items())
        super().__init__(f"{code}{' ' + reason if reason else ''}: {message}{f' ({values})' if values else ''}")
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms


class TransferFailed(SpectrumKVError):
    """A transfer that ended in another state than COMMITTED. `report` is its v1.TransferReport."""

    def __init__(self, report: report_pb2.TransferReport) -> None:
        super().__init__(_code_name(report.code), report.reason, report.message, {"transfer_id": report.transfer_id})
        self.report = report


def _code_name(code: int) -> str:
    for status in grpc.StatusCode:
        if status.value[0] == code:
            return str(status.name)
    return str(code)


def error_from_rpc(error: grpc.RpcError) -> SpectrumKVError:
    """The SpectrumKVError of a gRPC failure, with its ErrorInfo and RetryInfo where it carries them."""
    code: grpc.StatusCode = error.code()
    reason, metadata, retry_after_ms = "", {}, None
    for key, value in error.trailing_metadata() or ():
        if key != _STATUS_KEY:
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
        except Exception:  # a detail that cannot be read must not hide the error it belongs to
            continue
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                retry_after_ms = retry.retry_delay.ToMilliseconds()
    return SpectrumKVError(code.name, reason, error.details() or "", metadata, retry_after_ms)


def retry(call: Callable[[], T], *, attempts: int = 5, timeout_s: float = 30.0, jitter: float = 0.2) -> T:
    """Calls until it succeeds, waiting as long as the daemon asks (RetryInfo, plus up to `jitter` of it).

    Errors without RetryInfo, the last attempt's error, and an error whose wait would pass `timeout_s` are raised. Use
    it only around calls that are idempotent: those with a transfer_id or a request_id are.
    """
    give_up = time.monotonic() + timeout_s
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except SpectrumKVError as error:
            if error.retry_after_ms is None or attempt == attempts:
                raise
            wait_s = error.retry_after_ms / 1000 * (1 + jitter * random.random())
            if time.monotonic() + wait_s > give_up:
                raise
            time.sleep(wait_s)
    raise ValueError(f"attempts must be at least 1, not {attempts}")


@contextlib.contextmanager
def rpc_errors() -> Iterator[None]:
    """What gRPC raises in the block becomes a SpectrumKVError; a call on a closed client is CANCELLED."""
    try:
        yield
        return
    except grpc.RpcError as error:
        ours = error_from_rpc(error)
        # gRPC raises the call itself, so that its traceback leads back to it: it would be left for a later collection. In
        # the interpreter's last one it takes a lock that a stopped thread of gRPC's may hold: the program would not end.
        error.__traceback__ = None
    except ValueError as error:
        if "Cannot invoke RPC" not in str(error):  # gRPC's words for a channel that was closed
            raise
        ours = SpectrumKVError("CANCELLED", "", "the client is closed")
    try:
        raise ours
    finally:
        del ours  # its traceback leads to this frame


def rpc(method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
    """One unary call; raises SpectrumKVError."""
    with rpc_errors():
        return method(request, timeout=timeout_s)
