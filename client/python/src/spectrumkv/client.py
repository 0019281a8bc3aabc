"""The worker's side of spectrumkvd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from spectrumkv.bearer import BearerToken, read_token
from spectrumkv.cuda import ExportedMemory
from spectrumkv.errors import SpectrumKVError, TransferFailed, rpc, rpc_errors
from spectrumkv.groups import Group, block_runs
from spectrumkv.pools import CudaPool, DaemonOwnedPool, Pool, SharedMemoryPool
from spectrumkv.v1 import (
    policy_pb2,
    probe_service_pb2,
    probe_service_pb2_grpc,
    report_pb2,
    schema_pb2,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

# Block ids in token order: of group 0, or of each group.
Blocks = Sequence[int] | Mapping[int, Sequence[int]]

_MAX_MESSAGE_BYTES = 64 << 20


class Client:
    """A connection to the daemon beside this worker. Thread-safe; a context manager.

    address: path of the daemon's Unix socket ("/run/...", "unix:/run/..."), or "host:port" on loopback.
    timeout_s: limit of every call but watch and wait; None: none.
    token_file: of a "host:port", the file that the daemon's worker.tcp_token_file names.

    Every method raises SpectrumKVError. Transfers are named by a transfer_id that the caller chooses, 1..128 characters
    of A-Z a-z 0-9 . _ : - , the same in both halves. Calls that start a transfer answer at once. deadline_ms counts
    from the call, 0 is the daemon's default. role ("SENDER", "RECEIVER") is needed only where one daemon has both
    halves of a transfer.
    """

    def __init__(self, address: str, *, timeout_s: float | None = 60.0, token_file: str = "") -> None:
        target = f"unix:{address}" if address.startswith("/") else address
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.enable_http_proxy", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ],
        )
        calls = grpc.intercept_channel(self._channel, BearerToken(read_token(token_file))) if token_file else self._channel
        self.timeout_s = timeout_s
        self.closed = False
        # The generated stubs, for what has no method here.
        self.worker: Any = worker_service_pb2_grpc.WorkerServiceStub(calls)
        self.probes: Any = probe_service_pb2_grpc.ProbeServiceStub(calls)

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
        request = worker_service_pb2.PlanRequest(
            token_count=token_count, blocks=_blocks(blocks), policy=policy, peer=peer,
            link_bytes_per_second=link_bytes_per_second,
        )  # fmt: skip
        answer: worker_service_pb2.PlanResponse = pool.call(self.worker.Plan, request)
        return answer

    def send(
        self, transfer_id: str, *, peer: str, pool: Pool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"",
    ) -> None:  # fmt: skip
        """Pushes blocks to the daemon at `peer` ("host:port", or "self"), whose worker calls expect.

        token: empty or 16 bytes, the same as given to expect. layerwise: nothing is written yet, advance tells.
        Otherwise the blocks are final, and must not be written until the transfer is terminal. written_event: of a pool on
        a GPU, the handle of an event behind the writes (cuda.export_event); without one they must have finished.
        """
        request = worker_service_pb2.SendRequest(
            transfer_id=transfer_id, transfer_token=token, peer=peer, token_count=token_count, blocks=_blocks(blocks),
            policy=policy, deadline_ms=deadline_ms, layerwise=layerwise, written_event=written_event,
        )  # fmt: skip
        pool.call(self.worker.Send, request)

    def publish(
        self, transfer_id: str, *, pool: Pool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"",
    ) -> None:  # fmt: skip
        """Holds blocks until a peer fetches them. As send otherwise."""
        request = worker_service_pb2.PublishRequest(
            transfer_id=transfer_id, transfer_token=token, token_count=token_count, blocks=_blocks(blocks),
            policy=policy, deadline_ms=deadline_ms, layerwise=layerwise, written_event=written_event,
        )  # fmt: skip
        pool.call(self.worker.Publish, request)

    def advance(
        self, transfer_id: str, *, layers: int, tokens: int, scores: Sequence[float] | None = None,
        queries: policy_pb2.RecentQueries | None = None,
        written_event: bytes = b"",
    ) -> None:  # fmt: skip
        """Layers 0..layers-1 (in ascending layer index) are written for tokens 0..tokens-1.

        scores: importance of those tokens, [tokens], for what is planned from now on. queries: from recent_queries(), of
        written layers, in place of scores where the transfer was opened with importance="RECENT_QUERIES". written_event:
        as in send.
        """
        request = worker_service_pb2.AdvanceRequest(
            transfer_id=transfer_id, layers=layers, tokens=tokens, queries=queries, written_event=written_event
        )
        if scores is not None:
            request.scores.extend(float(score) for score in scores)
        rpc(self.worker.Advance, request, self.timeout_s)

    def expect(
        self, transfer_id: str, *, pool: Pool, token_count: int, blocks: Blocks, token: bytes = b"",
        deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False,
    ) -> None:  # fmt: skip
        """Reserves destination blocks for a push. They must not be read or written until layers are ready in them.

        accept_dropped: the source may drop tokens. exact_conversion: refuse a source whose dtype would be rounded.
        """
        request = worker_service_pb2.ExpectRequest(
            transfer_id=transfer_id, transfer_token=token, token_count=token_count, blocks=_blocks(blocks),
            deadline_ms=deadline_ms, accept_dropped=accept_dropped, exact_conversion=exact_conversion,
        )  # fmt: skip
        pool.call(self.worker.Expect, request)

    def fetch(
        self, transfer_id: str, *, peer: str, pool: Pool, token_count: int, blocks: Blocks, token: bytes = b"",
        deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False,
    ) -> None:  # fmt: skip
        """Reserves destination blocks and pulls what the worker of the daemon at `peer` published. As expect otherwise."""
        request = worker_service_pb2.FetchRequest(
            transfer_id=transfer_id, transfer_token=token, peer=peer, token_count=token_count, blocks=_blocks(blocks),
            deadline_ms=deadline_ms, accept_dropped=accept_dropped, exact_conversion=exact_conversion,
        )  # fmt: skip
        pool.call(self.worker.Fetch, request)

    def watch(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None
    ) -> Iterator[worker_service_pb2.WatchTransferResponse]:
        """Events of a transfer: layers_ready, progress, and last `terminal` with the report."""
        request = worker_service_pb2.WatchTransferRequest(transfer=_key(transfer_id, role))
        with rpc_errors():
            stream = self.worker.WatchTransfer(request, timeout=timeout_s)
            try:
                yield from stream
            finally:
                stream.cancel()

    def wait(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None,
        on_layers_ready: Callable[[int], None] | None = None,
    ) -> report_pb2.TransferReport:  # fmt: skip
        """Waits for the end. The report of a committed transfer; raises TransferFailed for any other end.

        on_layers_ready is called with the number of layers complete in the destination, as it grows.
        """
        for event in self.watch(transfer_id, role=role, timeout_s=timeout_s):
            if event.HasField("layers_ready") and on_layers_ready is not None:
                on_layers_ready(event.layers_ready.layers)
            if event.HasField("terminal"):
                if event.terminal.state != report_pb2.TRANSFER_STATE_COMMITTED:
                    raise TransferFailed(event.terminal)
                return event.terminal
        raise SpectrumKVError("UNAVAILABLE", "", f"the daemon ended the watch of {transfer_id} without a last event")

    def get_transfer(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        """Where a transfer stands; also for a while after its end."""
        request = worker_service_pb2.GetTransferRequest(transfer=_key(transfer_id, role))
        report: report_pb2.TransferReport = rpc(self.worker.GetTransfer, request, self.timeout_s).report
        return report

    def cancel(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        """Ends a transfer; returns when no byte can land or be read any more. One that had committed stays so."""
        request = worker_service_pb2.CancelTransferRequest(transfer=_key(transfer_id, role))
        report: report_pb2.TransferReport = rpc(self.worker.CancelTransfer, request, self.timeout_s).report
        return report

    def release(self, transfer_id: str, *, role: str = "") -> None:
        """Withdraws a publish that nobody fetched; forgets a transfer that has ended."""
        request = worker_service_pb2.ReleaseTransferRequest(transfer=_key(transfer_id, role))
        rpc(self.worker.ReleaseTransfer, request, self.timeout_s)

    def report_first_token(self, transfer_id: str, seconds: float, *, role: str = "") -> None:
        """The time to first token of the request that this transfer was for, for the daemon's metric."""
        request = worker_service_pb2.ReportFirstTokenRequest(
            transfer=_key(transfer_id, role), time_to_first_token_seconds=seconds
        )
        rpc(self.worker.ReportFirstToken, request, self.timeout_s)

    def report_trials(
        self, probe_id: str, results: Sequence[probe_service_pb2.TrialResult]
    ) -> list[probe_service_pb2.Verdict]:
        """Ends a probe (spectrumkv.probe); its verdicts, which hold from now on."""
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


def _blocks(blocks: Blocks) -> list[schema_pb2.GroupBlocks]:
    by_group = blocks if isinstance(blocks, Mapping) else {0: blocks}
    return [block_runs(ids, group) for group, ids in by_group.items()]


def _key(transfer_id: str, role: str) -> worker_service_pb2.TransferKey:
    value = report_pb2.TransferRole.Value(f"TRANSFER_ROLE_{role or 'UNSPECIFIED'}")
    return worker_service_pb2.TransferKey(transfer_id=transfer_id, role=value)
