"""Keeps a pool's lease."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spectrumkv.errors import SpectrumKVError, rpc_errors
from spectrumkv.v1 import schema_pb2, worker_service_pb2

if TYPE_CHECKING:
    from spectrumkv.pools import Pool

_log = logging.getLogger("spectrumkv")
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_LONGEST_ASKED_S = 60.0


class HoldThread:
    """One HoldPool stream with a ping every third of the lease, for as long as the pool is open.

    When the stream breaks or the daemon says that the pool is no more, the pool is registered again, with growing
    pauses between attempts, where it can be; otherwise, and when the client is closed, the thread ends.
    """

    def __init__(self, worker: Any, pool: Pool) -> None:
        self._worker = worker
        self._pool = pool
        self._stopped = threading.Event()
        self._closing = threading.Event()
        self._held = threading.Event()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="spectrumkv-hold", daemon=True)
        self._thread.start()

    def closing(self) -> None:
        """The pool is about to be unregistered: its end is no reason to register it again."""
        self._closing.set()

    def not_closing(self) -> None:
        self._closing.clear()

    def wait_held(self, timeout_s: float) -> bool:
        """Waits until the daemon has answered the stream that is open now: from then on it notices when we die."""
        return self._held.wait(timeout_s)

    def stop(self) -> None:
        """Ends the stream and the thread. Idempotent."""
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        asked_s = 0.0  # by the daemon that would not register the pool again
        lost: schema_pb2.PoolRef | None = None
        while not self._stopped.is_set():
            ref = self._pool.ref
            held, why = self._hold(ref)
            if self._pool.client.closed:
                _log.info("pool %s is no longer held: its client is closed", ref.pool_id)
                return
            if self._stopped.is_set() or self._closing.is_set():
                self._stopped.wait(_FIRST_WAIT_S)  # until close() has its answer
                continue
            wait_s = _FIRST_WAIT_S if held else min(wait_s * 2, _LONGEST_WAIT_S)
            if ref is not lost:  # once; while the daemon is away, the attempts to register again say how things stand
                _log.warning("pool %s is no longer held: %s", ref.pool_id, why)
            lost = ref
            if self._stopped.wait(max(wait_s, asked_s)):
                return
            asked_s = 0.0
            try:
                if not self._pool.register_again(ref):
                    return
            except SpectrumKVError as error:
                if self._pool.client.closed:
                    return
                asked_s = min((error.retry_after_ms or 0) / 1000, _LONGEST_ASKED_S)
                _log.warning("pool %s cannot be registered again yet: %s", ref.pool_id, error)

    def _hold(self, ref: schema_pb2.PoolRef) -> tuple[bool, str]:
        """Holds until the stream ends. (whether the daemon ever answered, why it ended)"""
        over = threading.Event()
        answered = False
        try:
            with rpc_errors():
                self._stream = self._worker.HoldPool(self._pings(ref, over))
                for response in self._stream:
                    answered = True
                    self._held.set()
                    if response.event == "DRAINING":  # new work is refused; what the pool holds is still kept
                        _log.warning("the daemon of pool %s is draining", ref.pool_id)
                    elif response.event:
                        return answered, response.event
            return answered, "the stream ended"
        except SpectrumKVError as error:
            return answered, error.message or error.code
        finally:
            self._held.clear()
            over.set()
            self._stream = None  # see rpc_errors: no call may be left when the program ends

    def _pings(self, ref: schema_pb2.PoolRef, over: threading.Event) -> Iterator[worker_service_pb2.HoldPoolRequest]:
        while not (self._stopped.is_set() or over.is_set()):
            yield worker_service_pb2.HoldPoolRequest(pool=ref)
            over.wait(self._pool.lease_ttl_ms / 3000)
