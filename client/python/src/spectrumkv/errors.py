"""What can go wrong, and trying again."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from spectrumkv.v1 import report_pb2

T = TypeVar("T")
_STATUS_KEY = "grpc-status-details-bin"


class SpectrumKVError(Exception):
    """A call that the daemon refused, or that did not reach it.

    What is raised is also of the class of its code (NotFound, ...) and, where the daemon gave a reason that this version
    knows, of that of the reason (reasons.UNKNOWN_POOL, ...): catch whichever says what you mean.

    code: name of the google.rpc.Code, for example "NOT_FOUND".
    reason: the daemon's stable UPPER_SNAKE reason, for example "UNKNOWN_POOL"; "" where no daemon spoke.
    metadata: the offending values, as strings.
    retry_after_ms: when to try again; None where the daemon does not say that trying again helps.
    """

    def __new__(cls, code: str, reason: str, *_: Any, **__: Any) -> SpectrumKVError:
        kind: type[SpectrumKVError] = _class_of(cls, _CODES.get(code), _REASONS.get(reason))
        return Exception.__new__(kind)

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

    def __reduce__(self) -> Any:
        return SpectrumKVError, (self.code, self.reason, self.message, self.metadata, self.retry_after_ms)


class TransferFailed(SpectrumKVError):
    """A transfer that ended in another state than COMMITTED. `report` is its v1.TransferReport."""

    def __new__(cls, report: report_pb2.TransferReport) -> TransferFailed:
        made = super().__new__(cls, _code_name(report.code), report.reason)
        assert isinstance(made, TransferFailed)
        return made

    def __init__(self, report: report_pb2.TransferReport) -> None:
        super().__init__(_code_name(report.code), report.reason, report.message, {"transfer_id": report.transfer_id})
        self.report = report

    def __reduce__(self) -> Any:
        return TransferFailed, (self.report,)


class Cancelled(SpectrumKVError):
    """CANCELLED: by a caller, or the client was closed."""


class Unknown(SpectrumKVError):
    """UNKNOWN: how it ended cannot be found out."""


class InvalidArgument(SpectrumKVError):
    """INVALID_ARGUMENT: the request is wrong, whatever the daemon's state."""


class DeadlineExceeded(SpectrumKVError):
    """DEADLINE_EXCEEDED: the time that was given has passed."""


class NotFound(SpectrumKVError):
    """NOT_FOUND: no such pool, transfer or block."""


class AlreadyExists(SpectrumKVError):
    """ALREADY_EXISTS: the id is in use for something else."""


class PermissionDenied(SpectrumKVError):
    """PERMISSION_DENIED: known, and not allowed."""


class ResourceExhausted(SpectrumKVError):
    """RESOURCE_EXHAUSTED: no room now; see retry_after_ms and retry()."""


class FailedPrecondition(SpectrumKVError):
    """FAILED_PRECONDITION: right in itself, but not in the state that things are in."""


class Aborted(SpectrumKVError):
    """ABORTED: something newer took its place."""


class OutOfRange(SpectrumKVError):
    """OUT_OF_RANGE."""


class Unimplemented(SpectrumKVError):
    """UNIMPLEMENTED: this daemon cannot do it."""


class Internal(SpectrumKVError):
    """INTERNAL: a bug."""


class Unavailable(SpectrumKVError):
    """UNAVAILABLE: the daemon, or its peer, cannot be reached or takes nothing new."""


class DataLoss(SpectrumKVError):
    """DATA_LOSS: what arrived is not what was sent."""


class Unauthenticated(SpectrumKVError):
    """UNAUTHENTICATED: no credentials, or none that are accepted."""


_CODES: dict[str, type[SpectrumKVError]] = {
    "CANCELLED": Cancelled, "UNKNOWN": Unknown, "INVALID_ARGUMENT": InvalidArgument,
    "DEADLINE_EXCEEDED": DeadlineExceeded, "NOT_FOUND": NotFound, "ALREADY_EXISTS": AlreadyExists,
    "PERMISSION_DENIED": PermissionDenied, "RESOURCE_EXHAUSTED": ResourceExhausted,
    "FAILED_PRECONDITION": FailedPrecondition, "ABORTED": Aborted, "OUT_OF_RANGE": OutOfRange,
    "UNIMPLEMENTED": Unimplemented, "INTERNAL": Internal, "UNAVAILABLE": Unavailable, "DATA_LOSS": DataLoss,
    "UNAUTHENTICATED": Unauthenticated,
}  # fmt: skip
_REASONS: dict[str, type[SpectrumKVError]] = {}


def register_reasons(names: Iterable[Any]) -> None:
    """Called by reasons.py with what it has."""
    for kind in names:
        if isinstance(kind, type) and issubclass(kind, SpectrumKVError) and kind is not SpectrumKVError:
            _REASONS[kind.__name__] = kind


_Kind = type[SpectrumKVError]
_combined: dict[tuple[_Kind, _Kind | None, _Kind | None], _Kind] = {}  # as many as there are classes to combine


def _class_of(base: _Kind, code: _Kind | None, reason: _Kind | None) -> _Kind:
    """A class that is all of these."""
    made = _combined.get((base, code, reason))
    if made is not None:
        return made
    mixed = [kind for kind in (reason, code) if kind is not None and not issubclass(base, kind)]
    if not mixed:
        made = base
    elif len(mixed) == 1 and base is SpectrumKVError:
        made = mixed[0]
    else:
        named = {"__module__": base.__module__, "__doc__": mixed[0].__doc__}
        made = type((reason or mixed[0]).__name__, (*mixed, base), named)
    return _combined.setdefault((base, code, reason), made)


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
            time.sleep(pause_s(error, attempt == attempts, give_up, jitter))
    raise ValueError(f"attempts must be at least 1, not {attempts}")


def pause_s(error: SpectrumKVError, last: bool, give_up: float, jitter: float) -> float:
    """How long to wait before the next attempt; raises the error where there is to be none. For retry, here and in aio."""
    if error.retry_after_ms is None or last:
        raise error
    wait_s = error.retry_after_ms / 1000 * (1 + jitter * random.random())
    if time.monotonic() + wait_s > give_up:
        raise error
    return wait_s


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
