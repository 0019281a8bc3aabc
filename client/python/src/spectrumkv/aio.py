"""The client for asyncio: what waits for a daemon is awaited.

    async with aio.Client("/run/spectrumkv/worker.sock") as client:
        async with await client.shared_memory_pool([group], model="my-model") as pool:
            await client.send("request-1", peer="10.0.0.7:7420", pool=pool, token_count=48, blocks=[5, 9, 2])
            report = await client.wait("request-1")

Pools are those of the other client: their leases are kept by threads, whatever the event loop does, and one pool may be
used from both. Errors are the same, too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from spectrumkv import requests
from spectrumkv.bearer import read_token
from spectrumkv.client import Client as SyncClient
from spectrumkv.errors import SpectrumKVError, error_from_rpc, pause_s
from spectrumkv.groups import Group
from spectrumkv.pools import DaemonOwnedPool, SharedMemoryPool
from spectrumkv.pools import Pool as SyncPool
from spectrumkv.requests import WHOLE, Blocks, Part
from spectrumkv.v1 import policy_pb2, report_pb2, worker_service_pb2, worker_service_pb2_grpc

T = TypeVar("T")
AnyPool = TypeVar("AnyPool", bound=SyncPool)


async def retry(
    call: Callable[[], Awaitable[T]], *, attempts: int = 5, timeout_s: float = 30.0, jitter: float = 0.2
) -> T:
    """As spectrumkv.retry."""
    give_up = time.monotonic() + timeout_s
    for attempt in range(1, attempts + 1):
        try:
            return await call()
        except SpectrumKVError as error:
            wait_s = pause_s(error, attempt == attempts, give_up, jitter)
        await asyncio.sleep(wait_s)
    raise ValueError(f"attempts must be at least 1, not {attempts}")


class Pool(Generic[AnyPool]):
    """A registered pool, closed by `async with`. `sync` is the pool itself, with its arrays (sync.k(0), ...)."""

    def __init__(self, pool: AnyPool) -> None:
        self.sync = pool

    async def put(self, kv: NDArray[Any], blocks: Sequence[int], group: int = 0) -> int:
        return await asyncio.to_thread(self.sync.put, kv, blocks, group)

    async def get(self, blocks: Sequence[int], group: int = 0) -> NDArray[Any]:
        return np.asarray(await asyncio.to_thread(self.sync.get, blocks, group))

    async def close(self, timeout_ms: int = 0) -> None:
        await asyncio.to_thread(self.sync.close, timeout_ms)

    async def __aenter__(self) -> Pool[AnyPool]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.sync.__exit__, kind, error, trace)


class Client:
    """As spectrumkv.Client, for one event loop. Made inside it; an asynchronous context manager.

    A method that is cancelled ends its call; what the daemon has begun by it goes on there (cancel ends it). `pool` is
    an aio.Pool or one of the other client's.
    """

    def __init__(
        self, address: str, *, timeout_s: float | None = 60.0, token_file: str = "", retry_s: float = 0.0
    ) -> None:
        self.sync = SyncClient(address, timeout_s=timeout_s, token_file=token_file, retry_s=retry_s)
        self._metadata = [("authorization", f"Bearer {read_token(token_file)}")] if token_file else []
        self._channel = grpc.aio.insecure_channel(requests.target_of(address), options=requests.CHANNEL_OPTIONS)
        # The generated stub, for what has no method here.
        self.worker: Any = worker_service_pb2_grpc.WorkerServiceStub(self._channel)

    async def shared_memory_pool(self, groups: Sequence[Group], *, model: str, **options: Any) -> Pool[SharedMemoryPool]:
        """Makes a shared memory segment for `groups` and registers it; options are those of SharedMemoryPool."""
        return Pool(await asyncio.to_thread(self.sync.shared_memory_pool, groups, model=model, **options))

    async def daemon_owned_pool(self, groups: Sequence[Group], *, model: str, **options: Any) -> Pool[DaemonOwnedPool]:
        """A pool in the daemon's memory; options are those of DaemonOwnedPool."""
        return Pool(await asyncio.to_thread(self.sync.daemon_owned_pool, groups, model=model, **options))

    async def call(self, method: Any, request: Any) -> Any:
        """One call of the generated stub, with this client's limits; raises SpectrumKVError."""

        async def once() -> Any:
            try:
                return await method(request, timeout=self.sync.timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                ours = error_from_rpc(error)
            except grpc.aio.UsageError:
                ours = SpectrumKVError("CANCELLED", "", "the client is closed")
            raise ours

        if self.sync.retry_s <= 0:
            return await once()
        return await retry(once, attempts=sys.maxsize, timeout_s=self.sync.retry_s)

    async def _with_pool(self, method: Any, request: Any, pool: Pool[Any] | SyncPool) -> Any:
        """Once more after registering again where the daemon has forgotten the pool."""
        owner: SyncPool = pool.sync if isinstance(pool, Pool) else pool
        ref = owner.ref
        request.pool.CopyFrom(ref)
        try:
            return await self.call(method, request)
        except SpectrumKVError as error:
            if not owner.forgotten(error) or not await asyncio.to_thread(owner.register_again, ref):
                raise
        request.pool.CopyFrom(owner.ref)
        return await self.call(method, request)

    async def plan(
        self, pool: Pool[Any] | SyncPool, token_count: int, blocks: Blocks, policy: policy_pb2.Policy | None = None,
        *, peer: str = "", link_bytes_per_second: float | None = None,
    ) -> worker_service_pb2.PlanResponse:  # fmt: skip
        request = requests.plan(token_count, blocks, policy, peer, link_bytes_per_second)
        answer: worker_service_pb2.PlanResponse = await self._with_pool(self.worker.Plan, request, pool)
        return answer

    async def send(
        self, transfer_id: str, *, peer: str, pool: Pool[Any] | SyncPool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"", part: Part = WHOLE,
    ) -> None:  # fmt: skip
        request = requests.send(
            transfer_id, peer, token_count, blocks, policy, token, deadline_ms, layerwise, written_event, part
        )
        await self._with_pool(self.worker.Send, request, pool)

    async def publish(
        self, transfer_id: str, *, pool: Pool[Any] | SyncPool, token_count: int, blocks: Blocks,
        policy: policy_pb2.Policy | None = None, token: bytes = b"", deadline_ms: int = 0, layerwise: bool = False,
        written_event: bytes = b"", part: Part = WHOLE,
    ) -> None:  # fmt: skip
        request = requests.publish(
            transfer_id, token_count, blocks, policy, token, deadline_ms, layerwise, written_event, part
        )
        await self._with_pool(self.worker.Publish, request, pool)

    async def advance(
        self, transfer_id: str, *, layers: int, tokens: int, scores: Sequence[float] | None = None,
        queries: policy_pb2.RecentQueries | None = None, written_event: bytes = b"", part_index: int = 0,
    ) -> None:  # fmt: skip
        request = requests.advance(transfer_id, layers, tokens, scores, queries, written_event, part_index)
        await self.call(self.worker.Advance, request)

    async def expect(
        self, transfer_id: str, *, pool: Pool[Any] | SyncPool, token_count: int, blocks: Blocks, token: bytes = b"",
        deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False, part: Part = WHOLE,
        refinable: bool = False, refine_direct: bool = False,
    ) -> None:  # fmt: skip
        request = requests.expect(
            transfer_id, token_count, blocks, token, deadline_ms, accept_dropped, exact_conversion, part, refinable,
            refine_direct,
        )
        await self._with_pool(self.worker.Expect, request, pool)

    async def fetch(
        self, transfer_id: str, *, peer: str, pool: Pool[Any] | SyncPool, token_count: int, blocks: Blocks,
        token: bytes = b"", deadline_ms: int = 0, accept_dropped: bool = False, exact_conversion: bool = False, part: Part = WHOLE,
        refinable: bool = False, refine_direct: bool = False,
    ) -> None:  # fmt: skip
        request = requests.fetch(
            transfer_id, peer, token_count, blocks, token, deadline_ms, accept_dropped, exact_conversion, part, refinable,
            refine_direct,
        )
        await self._with_pool(self.worker.Fetch, request, pool)

    async def watch(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None, until_exact: bool = False
    ) -> AsyncIterator[worker_service_pb2.WatchTransferResponse]:
        """Events of a transfer: layers_ready, progress, and last `terminal` with the report. until_exact: of one that has
        committed and is retained, then `exact` once the destination is known to equal its source, or `released` when nothing
        is retained any more."""
        request = worker_service_pb2.WatchTransferRequest(
            transfer=requests.key_of(transfer_id, role), until_exact=until_exact
        )
        stream = self.worker.WatchTransfer(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for event in stream:
                yield event
        except grpc.RpcError as error:
            ours = error_from_rpc(error)
        else:
            return
        finally:
            stream.cancel()
        raise ours

    async def wait(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None,
        on_layers_ready: Callable[[int], None] | None = None,
        on_progress: Callable[[worker_service_pb2.Progress], None] | None = None,
    ) -> report_pb2.TransferReport:  # fmt: skip
        """As the other client's; the callbacks are called in the event loop."""
        async for event in self.watch(transfer_id, role=role, timeout_s=timeout_s):
            report = requests.end_of(event, on_layers_ready, on_progress)
            if report is not None:
                return report
        raise SpectrumKVError("UNAVAILABLE", "", f"the daemon ended the watch of {transfer_id} without a last event")

    async def wait_exact(
        self, transfer_id: str, *, role: str = "", timeout_s: float | None = None
    ) -> report_pb2.TransferReport:  # fmt: skip
        async for event in self.watch(transfer_id, role=role, timeout_s=timeout_s, until_exact=True):
            requests.end_of(event, None, None)
            if event.WhichOneof("event") in ("exact", "released"):
                report: report_pb2.TransferReport = getattr(event, event.WhichOneof("event"))
                return report
        raise SpectrumKVError("UNAVAILABLE", "", f"the daemon ended the watch of {transfer_id} without a last event")

    async def get_transfer(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        request = worker_service_pb2.GetTransferRequest(transfer=requests.key_of(transfer_id, role))
        report: report_pb2.TransferReport = (await self.call(self.worker.GetTransfer, request)).report
        return report

    async def cancel(self, transfer_id: str, *, role: str = "") -> report_pb2.TransferReport:
        request = worker_service_pb2.CancelTransferRequest(transfer=requests.key_of(transfer_id, role))
        report: report_pb2.TransferReport = (await self.call(self.worker.CancelTransfer, request)).report
        return report

    async def refine(
        self, transfer_id: str, refine_id: str, *, tier: str = "RAW", tokens: Sequence[tuple[int, int]] = (),
        layers: Sequence[int] = (), scores: Sequence[float] | None = None, budget: float | None = None,
        direct: bool = False, peer: str = "", deadline_ms: int = 0,
    ) -> worker_service_pb2.RefineResponse:  # fmt: skip
        request = requests.refine(transfer_id, refine_id, peer, tokens, layers, scores, tier, budget, direct, deadline_ms)
        answer: worker_service_pb2.RefineResponse = await self.call(self.worker.Refine, request)
        return answer

    async def apply_refinement(
        self, refine_id: str, *, max_bytes: int = 0, read_event: bytes = b""
    ) -> worker_service_pb2.ApplyRefinementResponse:  # fmt: skip
        request = worker_service_pb2.ApplyRefinementRequest(
            refine_id=refine_id, max_bytes=max_bytes, read_event=read_event
        )
        answer: worker_service_pb2.ApplyRefinementResponse = await self.call(self.worker.ApplyRefinement, request)
        return answer

    async def release(self, transfer_id: str, *, role: str = "", keep_in_cache: bool = False) -> bool:
        request = worker_service_pb2.ReleaseTransferRequest(
            transfer=requests.key_of(transfer_id, role), keep_in_cache=keep_in_cache
        )
        cached: bool = (await self.call(self.worker.ReleaseTransfer, request)).kept_in_cache
        return cached

    async def report_first_token(self, transfer_id: str, seconds: float, *, role: str = "") -> None:
        request = worker_service_pb2.ReportFirstTokenRequest(
            transfer=requests.key_of(transfer_id, role), time_to_first_token_seconds=seconds
        )
        await self.call(self.worker.ReportFirstToken, request)

    async def close(self) -> None:
        await self._channel.close()
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
