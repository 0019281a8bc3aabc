"""The worker's side of spectrumkvd."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from spectrumkv import requests
from spectrumkv.bearer import BearerToken, read_token
from spectrumkv.cuda import ExportedMemory
from spectrumkv.errors import SpectrumKVError, retry, rpc, rpc_errors
from spectrumkv.groups import Group
from spectrumkv.pools import CudaPool, DaemonOwnedPool, Pool, SharedMemoryPool
from spectrumkv.requests import WHOLE, Blocks, Part
from spectrumkv.v1 import (
    policy_pb2,
    probe_service_pb2,
    probe_service_pb2_grpc,
    report_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)


class Client:
    """A connection to the daemon beside this worker. Thread-safe; a context manager.

    address: path of the daemon's Unix socket ("/run/...", "unix:/run/..."), or "host:port" on loopback.
    timeout_s: limit of every call but watch and wait; None: none.
    token_file: of a "host:port", the file that the daemon's worker.tcp_token_file names.
    retry_s: for how long a call that the daemon refuses with a delay (no room now) is made again after that delay; 0: it
        raises at once, and retry() is the caller's to use.

    Every method raises SpectrumKVError. Transfers are named by a transfer_id that the caller chooses, 1..128 characters
    of A-Z a-z 0-9 . _ : - , the same in both halves. Calls that start a transfer answer at once. deadline_ms counts
    from the call, 0 is the daemon's default. role ("SENDER", "RECEIVER") is needed only where one daemon has both
    halves of a transfer.
    """

    def __init__(self, address: str, *, timeout_s: float | None = 60.0, token_file: str = "", retry_s: float = 0.0) -> None:
        self._channel = grpc.insecure_channel(requests.target_of(address), options=requests.CHANNEL_OPTIONS)
        calls = grpc.intercept_channel(self._channel, BearerToken(read_token(token_file))) if token_file else self._channel
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self.closed = False
        # The generated stubs, for what has no method here.
        self.worker: Any = worker_service_pb2_grpc.WorkerServiceStub(calls)
        self.probes: Any = probe_service_pb2_grpc.ProbeServiceStub(calls)

    def call(self, method: Any, request: Any) -> Any:
        """One call of the generated stub, with this client's limits; raises SpectrumKVError."""
        if self.retry_s <= 0:
            return rpc(method, request, self.timeout_s)
        return retry(lambda: rpc(method, request, self.timeout_s), attempts=sys.maxsize, timeout_s=self.retry_s)

    def shared_memory_pool(self, groups: Sequence[Group], *, model: str, **options: Any) -> SharedMemoryPool:
        """Makes a shared memory segment for `groups` and registers it; options are those of SharedMemoryPool."""
        return SharedMemoryPool(self, groups, model=model, **options)

    def daemon_owned_pool(self, groups: Sequence[Group], *, model: str, **options: Any) -> DaemonOwnedPool:
        """A pool in the daemon's memory; options are those of DaemonOwnedPool."""
        return DaemonOwnedPool(self, groups, model=model, **options)

    def cuda_pool(
        self, groups: Sequence[Group], memories: Sequence[ExportedMemory], *, model: str, **options: Any
    ) -> CudaPool:
        """Registers GPU memory of this process; arguments are those of CudaPool."""
        return CudaPool(self, groups, memories, model=model, **options)

    def plan(
        self, pool: Pool, token_count: int, blocks: Blocks, policy: policy_pb2.Policy | None = None, *, peer: str = "",
        link_bytes_per_second: float | None = None,
    ) -> worker_service_pb2.PlanResponse:  # fmt: skip
        """What send would do with these blocks, without sending: tiers and exact wire bytes.

        With a peer ("host:port"), or a link of so many bytes a second, also how long it would take: predicted_seconds,
        or why it is not known, prediction_missing.
        """
        request = requests.plan(token_count, blocks, policy, peer, link_bytes_per_second)
        answer: worker_service_pb2.PlanResponse = pool.call(self.worker.Plan, request)
        return answer

    def send(
        self, transfer_id: str, *, peer: str, pool: Pool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"", part: Part = WHOLE,
    ) -> None:  # fmt: skip
        """Pushes blocks to the daemon at `peer` ("host:port", or "self"), whose worker calls expect.

        token: empty or 16 bytes, the same as given to expect. layerwise: nothing is written yet, advance tells.
        Otherwise the blocks are final, and must not be written until the transfer is terminal. written_event: of a pool on
        a GPU, the handle of an event behind the writes (cuda.export_event); without one they must have finished. part:
        (index, count), where the transfer is of several pools: a call for each, on both sides; all arrive, or none.
        """
        request = requests.send(
            transfer_id, peer, token_count, blocks, policy, token, deadline_ms, layerwise, written_event, part
        )
        pool.call(self.worker.Send, request)

    def publish(
        self, transfer_id: str, *, pool: Pool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"", part: Part = WHOLE,
    ) -> None:  # fmt: skip
        """Holds blocks until a peer fetches them. As send otherwise."""
        request = requests.publish(
            transfer_id, token_count, blocks, policy, token, deadline_ms, layerwise, written_event, part
        )
        pool.call(self.worker.Publish, request)

    def advance(
        self, transfer_id: str, *, layers: int, tokens: int, scores: Sequence[float] | None = None,
        queries: policy_pb2.RecentQueries | None = None,
        written_event: bytes = b"", part_index: int = 0,
    ) -> None:  # fmt: skip
        """Layers 0..layers-1 (in ascending layer index) are written for tokens 0..tokens-1.

        scores: importance of those tokens, [tokens], for what is planned from now on. queries: from recent_queries(), of
        written layers, in place of scores where the transfer was opened with importance="RECENT_QUERIES". written_event:
        as in send. part_index: of a transfer of several parts, the one that is written.
        """
        self.call(self.worker.Advance, requests.advance(transfer_id, layers, tokens, scores, queries, written_event, part_index))

    def expect(
        self, transfer_id: str, *, pool: Pool, token_count: int, blocks: Blocks, token: bytes = b"",
        deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False, part: Part = WHOLE,
        refinable: bool = False, refine_direct: bool = False,
    ) -> None:  # fmt: skip
        """Reserves destination blocks for a push. They must not be read or written until layers are ready in them.

        accept_dropped: the source may drop tokens. exact_conversion: refuse a source whose dtype would be rounded.
        refinable: refine may follow, if the source's policy has retain_seconds. refine_direct: what comes in the background
        (policy.refine) lands in the blocks at once.
        """
        request = requests.expect(
            transfer_id, token_count, blocks, token, deadline_ms, accept_dropped, exact_conversion, part, refinable,
            refine_direct,
        )
        pool.call(self.worker.Expect, request)

    def fetch(
        self, transfer_id: str, *, peer: str, pool: Pool, token_count: int, blocks: Blocks, token: bytes = b"",
        deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False, part: Part = WHOLE,
        refinable: bool = False, refine_direct: bool = False,
    ) -> None:  # fmt: skip
        """Reserves destination blocks and pulls what the worker of the daemon at `peer` published. As expect otherwise."""
        request = requests.fetch(
            transfer_id, peer, token_count, blocks, token, deadline_ms, accept_dropped, exact_conversion, part, refinable,
            refine_direct,
        )
        pool.call(self.worker.Fetch, request)

    def watch(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None, until_exact: bool = False
    ) -> Iterator[worker_service_pb2.WatchTransferResponse]:
        """Events of a transfer: layers_ready, progress, and last `terminal` with the report. until_exact: of one that has
        committed and is retained, then `exact` once the destination is known to equal its source, or `released` when nothing
        is retained any more."""
        request = worker_service_pb2.WatchTransferRequest(
            transfer=requests.key_of(transfer_id, role), until_exact=until_exact
        )
        with rpc_errors():
            stream = self.worker.WatchTransfer(request, timeout=timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def wait(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None,
        on_layers_ready: Callable[[int], None] | None = None,
        on_progress: Callable[[worker_service_pb2.Progress], None] | None = None,
    ) -> report_pb2.TransferReport:  # fmt: skip
        """Waits for the end. The report of a committed transfer; raises TransferFailed for any other end.

        on_layers_ready is called with the number of layers complete in the destination, as it grows; on_progress now and
        then with the state, chunks and bytes so far.
        """
        for event in self.watch(transfer_id, role=role, timeout_s=timeout_s):
            report = requests.end_of(event, on_layers_ready, on_progress)
            if report is not None:
                return report
        raise SpectrumKVError("UNAVAILABLE", "", f"the daemon ended the watch of {transfer_id} without a last event")

    def wait_exact(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None
    ) -> report_pb2.TransferReport:  # fmt: skip
        """Waits until refinement is over: the destination equals its source bit for bit, or nothing is retained any more. Which
        of the two, the report's `exact` says. At the sender: when it returns, the source's blocks are not read any more.
        Raises TransferFailed where the transfer itself does not commit."""
        for event in self.watch(transfer_id, role=role, timeout_s=timeout_s, until_exact=True):
            requests.end_of(event, None, None)
            if event.WhichOneof("event") in ("exact", "released"):
                report: report_pb2.TransferReport = getattr(event, event.WhichOneof("event"))
                return report
        raise SpectrumKVError("UNAVAILABLE", "", f"the daemon ended the watch of {transfer_id} without a last event")

    def get_transfer(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        """Where a transfer stands; also for a while after its end."""
        request = worker_service_pb2.GetTransferRequest(transfer=requests.key_of(transfer_id, role))
        report: report_pb2.TransferReport = self.call(self.worker.GetTransfer, request).report
        return report

    def cancel(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        """Ends a transfer; returns when no byte can land or be read any more. One that had committed stays so."""
        request = worker_service_pb2.CancelTransferRequest(transfer=requests.key_of(transfer_id, role))
        report: report_pb2.TransferReport = self.call(self.worker.CancelTransfer, request).report
        return report

    def refine(
        self, transfer_id: str, refine_id: str, *, tier: str = "RAW", tokens: Sequence[tuple[int, int]] = (),
        layers: Sequence[int] = (), scores: Sequence[float] | None = None, budget: float | None = None,
        direct: bool = False, peer: str = "", deadline_ms: int = 0,
    ) -> worker_service_pb2.RefineResponse:  # fmt: skip
        """Asks for better precision of what has arrived: of a transfer that was expected or fetched with refinable=True,
        whose source is still retained. The refinement is a transfer `refine_id` of its own, for wait, cancel and release.

        tier: what cells are to have; those that have it or better do not travel. tokens: (first, count) runs of positions;
        layers: indices in the model; not given: all. scores: how much each token matters, which come first where not all fit;
        budget: share of the raw KV bytes that may cross. direct: cells land in the blocks as they arrive; otherwise they wait
        for apply_refinement. peer: where the source is, where the daemon cannot know. The answer has `cells`; 0: there was
        nothing to gain, and there is no transfer refine_id; `cells_left` did not fit: ask again.
        """
        request = requests.refine(transfer_id, refine_id, peer, tokens, layers, scores, tier, budget, direct, deadline_ms)
        answer: worker_service_pb2.RefineResponse = self.call(self.worker.Refine, request)
        return answer

    def apply_refinement(
        self, refine_id: str, *, max_bytes: int = 0, read_event: bytes = b""
    ) -> worker_service_pb2.ApplyRefinementResponse:  # fmt: skip
        """Copies what a refinement has received into the blocks, at most max_bytes (0: all): call it when nobody reads them, or
        give, for blocks on a GPU, the handle of a CUDA IPC event that stands behind the last reads (read_event)."""
        request = worker_service_pb2.ApplyRefinementRequest(
            refine_id=refine_id, max_bytes=max_bytes, read_event=read_event
        )
        answer: worker_service_pb2.ApplyRefinementResponse = self.call(self.worker.ApplyRefinement, request)
        return answer

    def release(self, transfer_id: str, *, role: str = "", keep_in_cache: bool = False) -> bool:
        """Withdraws a publish that nobody fetched; forgets a transfer that has ended. Of one that is retained: when it
        returns, none of its blocks is read or written any more. keep_in_cache, of a retained source: its words move into the
        daemon's memory and can be asked for as before; False where there was no room for them."""
        request = worker_service_pb2.ReleaseTransferRequest(
            transfer=requests.key_of(transfer_id, role), keep_in_cache=keep_in_cache
        )
        cached: bool = (self.call(self.worker.ReleaseTransfer, request)).kept_in_cache
        return cached

    def report_first_token(self, transfer_id: str, seconds: float, *, role: str = "") -> None:
        """The time to first token of the request that this transfer was for, for the daemon's metric."""
        request = worker_service_pb2.ReportFirstTokenRequest(
            transfer=requests.key_of(transfer_id, role), time_to_first_token_seconds=seconds
        )
        self.call(self.worker.ReportFirstToken, request)

    def report_trials(
        self, probe_id: str, results: Sequence[probe_service_pb2.TrialResult]
    ) -> list[probe_service_pb2.Verdict]:
        """Adds to what came of a probe's trials (spectrumkv.probe). The last one ends it: its verdicts, which hold from now on."""
        request = probe_service_pb2.ReportTrialsRequest(probe_id=probe_id, results=results)
        return list(rpc(self.probes.ReportTrials, request, self.timeout_s).verdicts)

    def verdicts(self, model: str = "") -> list[probe_service_pb2.Verdict]:
        """Which tiers probes have opened or closed to a model, or to all: own ones, and those of the daemon's user."""
        request = probe_service_pb2.ListVerdictsRequest(model=model)
        return list(rpc(self.probes.ListVerdicts, request, self.timeout_s).verdicts)

    def delete_verdicts(self, model: str, revision: str = "") -> int:
        """Forgets own verdicts on a model, of one revision or all; how many there were."""
        request = probe_service_pb2.DeleteVerdictsRequest(model=model, revision=revision)
        return int(rpc(self.probes.DeleteVerdicts, request, self.timeout_s).deleted)

    def close(self) -> None:
        """Closes the connection; calls that are waiting, and later ones, raise CANCELLED. Idempotent.

        Close pools first: what a pool holds is released when its stream breaks, and it cannot be registered again.
        """
        self.closed = True  # before the channel: the threads of pools look here for why it broke
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
