"""A worker's registered KV cache: in shared memory of its own, or in memory of the daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spectrumkv.cuda import ExportedMemory
from spectrumkv.errors import SpectrumKVError, rpc, rpc_errors
from spectrumkv.generations import BlockGenerations
from spectrumkv.groups import Group, block_runs
from spectrumkv.hold import HoldThread
from spectrumkv.segment import SHM_DIRECTORY, SharedSegment
from spectrumkv.tensors import torch_view
from spectrumkv.v1 import schema_pb2, worker_service_pb2

if TYPE_CHECKING:
    from spectrumkv.client import Client

SelfPool = TypeVar("SelfPool", bound="Pool")

_GROUP_ALIGN = 4096
_GENERATION_BYTES = 8
_PUT_MESSAGE_BYTES = 1 << 20
_PLANES = (worker_service_pb2.PLANE_K, worker_service_pb2.PLANE_V)
# The daemon has forgotten the pool: it restarted, or the lease ran out.
_FORGOTTEN = frozenset({"STALE_EPOCH", "UNKNOWN_POOL", "LEASE_EXPIRED"})
# close() has nothing left to do when the daemon answers one of these.
_GONE = frozenset({"UNAVAILABLE", "NOT_FOUND", "FAILED_PRECONDITION"})


class Pool:
    """A registered pool. Made by Client.shared_memory_pool and Client.daemon_owned_pool; a context manager.

    A thread keeps the lease by a stream with a ping every third of it. Ping threads need the interpreter: code that
    holds the GIL longer than the lease loses the pool. Methods may be called from any thread.
    """

    # Whether the pool's bytes outlive the daemon, so that it may be registered again as if nothing had been.
    _restorable = False

    def __init__(self, client: Client, schema: schema_pb2.PoolSchema, groups: Sequence[Group], lease_ttl_ms: int) -> None:
        self.client = client
        self.groups = tuple(groups)
        self.schema = schema
        self._wanted_ttl_ms = lease_ttl_ms
        self._lock = threading.Lock()
        # Held while the daemon is asked to register the pool, which may take as long as a call; _lock never is, for `ref` is asked
        # for by threads and event loops that must not wait.
        self._registering = threading.Lock()
        self._closed = False
        self.registrations = 0
        self._ref, self.lease_ttl_ms = self._register()
        self._hold = HoldThread(client.worker, self)

    @property
    def ref(self) -> schema_pb2.PoolRef:
        """Id and epoch; changes when the pool is registered again."""
        with self._lock:
            return self._ref

    @property
    def pool_id(self) -> str:
        return self.ref.pool_id

    def wait_held(self, timeout_s: float = 20.0) -> bool:
        """Waits until the daemon holds the pool by this process's stream; False where it does not within timeout_s.

        From then on the daemon notices at once when this process dies. Before, and while the stream is broken, only the
        end of the lease tells it.
        """
        return self._hold.wait_held(timeout_s)

    def _register(self) -> tuple[schema_pb2.PoolRef, int]:
        request = worker_service_pb2.RegisterPoolRequest(
            request_id=str(uuid.uuid4()), schema=self.schema, lease_ttl_ms=self._wanted_ttl_ms
        )
        response = self.client.call(self.client.worker.RegisterPool, request)
        self.registrations += 1
        return response.pool, int(response.lease_ttl_ms)

    def register_again(self, stale: schema_pb2.PoolRef) -> bool:
        """Registers the pool anew if `stale` is still its reference. False where that cannot be made good: the pool is
        closed, or its bytes went with the daemon. Raises SpectrumKVError."""
        with self._registering:
            with self._lock:
                if self._closed or not self._restorable:
                    return False
                if self._ref != stale:
                    return True
            ref, lease_ttl_ms = self._register()
            with self._lock:
                if not self._closed:
                    self._ref, self.lease_ttl_ms = ref, lease_ttl_ms
                    return True
        self._unregister_late(ref)
        return False

    def _unregister_late(self, ref: schema_pb2.PoolRef) -> None:
        """Of a pool that was registered again while it was being closed: nobody uses it, and nobody else would end it."""
        with contextlib.suppress(SpectrumKVError):  # the end of its lease does it
            rpc(self.client.worker.UnregisterPool, worker_service_pb2.UnregisterPoolRequest(pool=ref), self.client.timeout_s)

    @staticmethod
    def forgotten(error: SpectrumKVError) -> bool:
        """Whether the daemon says by this that it does not know the pool any more."""
        return error.reason in _FORGOTTEN

    def call(self, method: Any, request: Any) -> Any:
        """Calls with request.pool set; once more after registering again where the daemon has forgotten the pool."""
        ref = self.ref
        request.pool.CopyFrom(ref)
        try:
            return self.client.call(method, request)
        except SpectrumKVError as error:
            if not self.forgotten(error) or not self.register_again(ref):
                raise
        request.pool.CopyFrom(self.ref)
        return self.client.call(method, request)

    def put(self, kv: NDArray[Any], blocks: Sequence[int], group: int = 0) -> int:
        """Writes whole blocks through the daemon; returns the bytes written.

        kv: [layers, planes, len(blocks), block_tokens, heads, head_dim] in the group's dtype (words for bfloat16).
        """
        shape = self._shape_of(blocks, group)
        if kv.shape != shape or kv.dtype != self.groups[group].numpy_dtype:
            raise ValueError(f"kv must be {self.groups[group].numpy_dtype} {shape}, not {kv.dtype} {kv.shape}")
        with rpc_errors():
            response = self.client.worker.PutBlocks(self._put_requests(kv, blocks, group), timeout=self.client.timeout_s)
        return int(response.bytes)

    def _put_requests(
        self, kv: NDArray[Any], blocks: Sequence[int], group: int
    ) -> Iterator[worker_service_pb2.PutBlocksRequest]:
        request = worker_service_pb2.PutBlocksRequest(pool=self.ref)
        size = 0
        for index, layer in enumerate(self.groups[group].layers):
            for plane in range(kv.shape[1]):
                for place, block in enumerate(blocks):
                    data = kv[index, plane, place].tobytes()
                    if request.blocks and size + len(data) > _PUT_MESSAGE_BYTES:
                        yield request
                        request, size = worker_service_pb2.PutBlocksRequest(), 0
                    request.blocks.add(group=group, layer=layer, plane=_PLANES[plane], block=block, data=data)
                    size += len(data)
        yield request

    def get(self, blocks: Sequence[int], group: int = 0) -> NDArray[Any]:
        """Reads whole blocks through the daemon: [layers, planes, len(blocks), block_tokens, heads, head_dim]."""
        spec = self.groups[group]
        out = np.empty(self._shape_of(blocks, group), spec.numpy_dtype)
        places = {block: place for place, block in enumerate(blocks)}
        layers = {layer: index for index, layer in enumerate(spec.layers)}
        request = worker_service_pb2.GetBlocksRequest(pool=self.ref, group=group, runs=block_runs(blocks, group).runs)
        left = out.shape[0] * out.shape[1] * out.shape[2]
        with rpc_errors():
            for response in self.client.worker.GetBlocks(request, timeout=self.client.timeout_s):
                for block in response.blocks:
                    plane = _PLANES.index(block.plane)
                    data = np.frombuffer(block.data, spec.numpy_dtype).reshape(out.shape[3:])
                    out[layers[block.layer], plane, places[block.block]] = data
                    left -= 1
        if left:
            raise SpectrumKVError("INTERNAL", "", f"GetBlocks left out {left} blocks")
        return out

    def _shape_of(self, blocks: Sequence[int], group: int) -> tuple[int, ...]:
        layers, planes, _, *block = self.groups[group].shape
        return (layers, planes, len(blocks), *block)

    def close(self, timeout_ms: int = 0) -> None:
        """Unregisters the pool, once no transfer touches it, and stops the hold thread. Idempotent.

        timeout_ms: how long to wait for transfers; 0: the daemon's default. When it passes, raises DEADLINE_EXCEEDED
        and the pool stays as it was. A daemon that is gone, or has forgotten the pool, is no error; nor is a client that
        was closed before: the daemon has let go of the pool when its stream broke.
        """
        with self._lock:
            if self._closed:
                return
            ref = self._ref
        request = worker_service_pb2.UnregisterPoolRequest(pool=ref, timeout_ms=timeout_ms)
        self._hold.closing()
        try:
            rpc(self.client.worker.UnregisterPool, request, self.client.timeout_s)
        except SpectrumKVError as error:
            if error.code not in _GONE and not self.client.closed:
                self._hold.not_closing()
                raise
        with self._lock:
            self._closed, last = True, self._ref
        if last != ref:
            self._unregister_late(last)
        self._hold.stop()

    def __enter__(self: SelfPool) -> SelfPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except SpectrumKVError:
            if error is None:  # do not hide the first failure
                raise


class SharedMemoryPool(Pool):
    """A pool in a shared memory segment that this process made; registered again by itself when the daemon restarts.

    All groups lie in one segment, each at a multiple of 4096 bytes. shared_dir: where the segment is made instead of
    /dev/shm, the daemon's memory.shared_dir as this process sees it; the daemon then maps it as a file. generations:
    blocks have sequence locks behind the groups, see writing().
    """

    _restorable = True

    def __init__(
        self, client: Client, groups: Sequence[Group], *, model: str, revision: str = "", lease_ttl_ms: int = 0,
        segment_name: str = "", shared_dir: str = "", tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1,
        generations: bool = False,
    ) -> None:  # fmt: skip
        offsets, size = [], 0
        for group in groups:
            offsets.append(size)
            size += -(-group.size_bytes // _GROUP_ALIGN) * _GROUP_ALIGN
        table_offset, table_bytes = size, 0
        if generations:
            table_bytes = max(group.num_blocks for group in groups) * _GENERATION_BYTES
            size += -(-table_bytes // _GROUP_ALIGN) * _GROUP_ALIGN
        self.segment = SharedSegment(size, segment_name, shared_dir or SHM_DIRECTORY)
        self._views = [g.view(self.segment.memory, at) for g, at in zip(groups, offsets, strict=True)]
        schema = schema_pb2.PoolSchema(
            model=model, revision=revision, tensor_parallel_rank=tensor_parallel_rank,
            tensor_parallel_size=tensor_parallel_size,
            groups=[g.to_proto(0, at) for g, at in zip(groups, offsets, strict=True)],
        )  # fmt: skip
        self.generations: BlockGenerations | None = None
        if generations:
            schema.generations.offset_bytes = table_offset
            table = self.segment.memory[table_offset : table_offset + table_bytes].view("<u8")
            self.generations = BlockGenerations(table)
        segment = schema.segments.add()
        if shared_dir:
            segment.file.path, segment.file.size_bytes = self.segment.name.lstrip("/"), size
        else:
            segment.posix_shm.name, segment.posix_shm.size_bytes = self.segment.name, size
        try:
            super().__init__(client, schema, groups, lease_ttl_ms)
        except BaseException:
            self.segment.close()
            raise

    def kv(self, group: int = 0) -> NDArray[Any]:
        """The cache itself, no copy: [layers, planes, num_blocks, block_tokens, heads, head_dim].

        Blocks named in a send or publish must not be written until that transfer is terminal. A pool made with
        `generations` is guarded: written inside writing(), blocks fail such a transfer instead of mixing into it.
        """
        return self._views[group]

    def head_view(self, first: int, count: int) -> Pool:
        """KV heads first .. first + count - 1 of the model as a pool of their own, over the same memory: for a transfer
        to or from a worker that holds other heads (sharding.head_slices). Groups without V (MLA) are not cut.

        Close it before this pool. Raises ValueError where this pool does not hold these heads.
        """
        schema = schema_pb2.PoolSchema()
        schema.CopyFrom(self.schema)
        for group in schema.groups:
            if group.kind == schema_pb2.GROUP_KIND_MLA:
                continue
            skipped = first - group.head_first
            if skipped < 0 or count < 1 or skipped + count > group.head_count:
                held = f"{group.head_first} to {group.head_first + group.head_count - 1}"
                raise ValueError(f"heads {first} to {first + count - 1} are not among those that the pool holds, {held}")
            group.head_first, group.head_count = first, count
            for layer in group.layers:
                for tensor in (layer.k, layer.v):
                    tensor.offset_bytes += skipped * tensor.head_stride_bytes
        groups = [dataclasses.replace(g, heads=count, head_first=first) if g.has_v else g for g in self.groups]
        return _View(self.client, schema, groups, self._wanted_ttl_ms)

    def writing(self, blocks: Iterable[int]) -> contextlib.AbstractContextManager[None]:
        """A context in which these blocks (of any group) may be written; see BlockGenerations.writing.

        Raises ValueError for a pool made without `generations`: nobody would look.
        """
        if self.generations is None:
            raise ValueError("the pool was made without generations")
        return self.generations.writing(blocks)

    def k(self, layer: int) -> NDArray[Any]:
        """Keys of a layer (index in the model), no copy: [num_blocks, block_tokens, heads, head_dim]."""
        return self._plane(layer, 0)

    def v(self, layer: int) -> NDArray[Any]:
        """Values of a layer (index in the model), no copy: [num_blocks, block_tokens, heads, head_dim]."""
        return self._plane(layer, 1)

    def torch(self, group: int = 0) -> Any:
        """kv() as a torch.Tensor of the group's dtype (bfloat16, too) over the same memory; see tensors.torch_view."""
        return torch_view(self._views[group], self.groups[group].dtype)

    def torch_k(self, layer: int) -> Any:
        """k() as a torch.Tensor."""
        return torch_view(self.k(layer), self._group_of(layer).dtype)

    def torch_v(self, layer: int) -> Any:
        """v() as a torch.Tensor."""
        return torch_view(self.v(layer), self._group_of(layer).dtype)

    def _group_of(self, layer: int) -> Group:
        return next(group for group in self.groups if layer in group.layers)

    def _plane(self, layer: int, plane: int) -> NDArray[Any]:
        for group, view in zip(self.groups, self._views, strict=True):
            if layer in group.layers:
                out: NDArray[Any] = view[group.layers.index(layer), plane]
                return out
        raise KeyError(f"layer {layer} is in no group")

    def write_tokens(self, kv: NDArray[Any], blocks: Sequence[int], group: int = 0) -> None:
        """Copies kv [layers, planes, tokens, heads, head_dim] into blocks, token t to the (t / block_tokens)-th.

        In a pool with `generations` the blocks are marked as being written meanwhile.
        """
        size = self.groups[group].block_tokens
        if kv.shape[2] > size * len(blocks):
            raise ValueError(f"{kv.shape[2]} tokens do not fit into {len(blocks)} blocks of {size}")
        with self.writing(blocks) if self.generations is not None else contextlib.nullcontext():
            for place, block in enumerate(blocks):
                part = kv[:, :, place * size : (place + 1) * size]
                self._views[group][:, :, block, : part.shape[2]] = part

    def read_tokens(self, token_count: int, blocks: Sequence[int], group: int = 0) -> NDArray[Any]:
        """A copy of the tokens in blocks, [layers, planes, token_count, heads, head_dim]."""
        size = self.groups[group].block_tokens
        if token_count > size * len(blocks):
            raise ValueError(f"{token_count} tokens are not in {len(blocks)} blocks of {size}")
        view = self._views[group][:, :, list(blocks)]
        layers, planes, _, _, heads, dim = view.shape
        out: NDArray[Any] = view.reshape(layers, planes, -1, heads, dim)[:, :, :token_count]
        return out

    def close(self, timeout_ms: int = 0) -> None:
        super().close(timeout_ms)
        self.segment.close()


class CudaPool(Pool):
    """A pool in GPU memory of this process; registered again by itself when the daemon restarts.

    memories: where the groups lie, as cuda.export_memory tells: one for each group, or one for each layer of each group in
    order (K and V of a layer in one allocation, as engines have it; the group's axes without L). They must stay allocated
    until close() has returned.
    """

    _restorable = True

    def __init__(
        self, client: Client, groups: Sequence[Group], memories: Sequence[ExportedMemory], *, model: str,
        revision: str = "", lease_ttl_ms: int = 0, tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1,
    ) -> None:  # fmt: skip
        schema = schema_pb2.PoolSchema(
            model=model, revision=revision, tensor_parallel_rank=tensor_parallel_rank,
            tensor_parallel_size=tensor_parallel_size, segments=[memory.to_proto() for memory in memories],
        )  # fmt: skip
        layers = sum(len(group.layers) for group in groups)
        if len(memories) == len(groups):
            schema.groups.extend(group.to_proto(i, 0) for i, group in enumerate(groups))
        elif len(memories) == layers:
            segment = 0
            for group in groups:
                schema.groups.append(dataclasses.replace(group, layers=group.layers[:1]).to_proto(segment, 0))
                for layer in group.layers[1:]:
                    segment += 1
                    alone = dataclasses.replace(group, layers=(layer,)).to_proto(segment, 0)
                    schema.groups[-1].layers.extend(alone.layers)
                segment += 1
        else:
            raise ValueError(f"{len(memories)} memories for {len(groups)} groups of {layers} layers: give one for each")
        super().__init__(client, schema, groups, lease_ttl_ms)


class _View(Pool):
    """A pool over a part of another one's memory."""

    _restorable = True


class DaemonOwnedPool(Pool):
    """A pool in memory of the daemon, written by put and read by get.

    Its bytes end with the daemon: after a restart calls raise STALE_EPOCH; make a new pool. device: uuid of the GPU it
    lies on; empty: host memory.
    """

    def __init__(
        self, client: Client, groups: Sequence[Group], *, model: str, revision: str = "", lease_ttl_ms: int = 0,
        tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1, device: str = "",
    ) -> None:  # fmt: skip
        schema = schema_pb2.PoolSchema(
            model=model, revision=revision, tensor_parallel_rank=tensor_parallel_rank,
            tensor_parallel_size=tensor_parallel_size,
        )  # fmt: skip
        size = 0
        for group in groups:
            schema.groups.append(group.to_proto(0, size))
            size += -(-group.size_bytes // _GROUP_ALIGN) * _GROUP_ALIGN
        segment = schema.segments.add()
        segment.daemon_owned.size_bytes, segment.daemon_owned.device = size, device
        super().__init__(client, schema, groups, lease_ttl_ms)
