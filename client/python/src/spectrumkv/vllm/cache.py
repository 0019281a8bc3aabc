"""vLLM's KV cache as a pool: where its tensors lie, and that they lie where the daemon sees them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spectrumkv.client import Client
from spectrumkv.groups import Group
from spectrumkv.pools import Pool
from spectrumkv.segment import SHM_DIRECTORY, SharedSegment
from spectrumkv.v1 import schema_pb2

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# Memory layouts of vLLM's CPU attention (the instruction set it is named after) whose K of a block and head is [head_dim, tokens]
# and whose V is [tokens, head_dim]. Others interleave tokens for matrix instructions, which strides cannot say.
_PLAIN_CPU = frozenset({"vec", "vec16"})


class SharedMemory:
    """Segments that vLLM's cache is allocated in."""

    def __init__(self, directory: str = "") -> None:
        self._directory = directory
        self.segments: list[SharedSegment] = []

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """What vLLM allocates for its cache inside, zeroed bytes on the CPU, is shared memory."""
        with _SharedZeros(self):
            yield

    def zeros(self, size_bytes: int) -> torch.Tensor:
        segment = SharedSegment(size_bytes, "", self._directory or SHM_DIRECTORY)
        self.segments.append(segment)
        return torch.from_numpy(segment.memory).view(torch.int8)

    def place(self, tensor: torch.Tensor) -> tuple[SharedSegment, int]:
        """The segment that a tensor lies in, and where. Raises ValueError."""
        for segment in self.segments:
            offset = tensor.data_ptr() - segment.memory.ctypes.data
            if 0 <= offset < segment.size_bytes:
                return segment, offset
        raise ValueError("vLLM has not allocated its KV cache in the connector's memory (get_mem_pool_context)")

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


class _SharedZeros(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args else kwargs.get("size")
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.zeros and isinstance(size, int) and kwargs.get("dtype") is torch.int8 and on_cpu:
            return self._memory.zeros(size)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Heads:
    """KV heads of the model, and the first of this worker."""

    total: int
    first: int


def layer_index(name: str) -> int:
    """Index of the layer in the model: 7 of "model.layers.7.self_attn.attn". Raises ValueError."""
    found = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", name)
    if len(found) != 1:
        raise ValueError(f"the layer's index cannot be told from its name, {name}")
    return int(found[0])


def cpu_groups(
    caches: Mapping[str, torch.Tensor], layouts: Mapping[str, str], heads: Heads, memory: SharedMemory
) -> tuple[schema_pb2.PoolSchema, list[Group]]:
    """Schema (without the model) of vLLM's cache on the CPU: for each layer [num_blocks, heads, block_tokens, 2 * head_dim],
    in which each block and head holds its K and then its V.

    layouts: by layer, the name of the attention's memory layout. Raises ValueError for what no schema can say.
    """
    schema = schema_pb2.PoolSchema()
    shapes: dict[tuple[Any, ...], list[tuple[int, torch.Tensor]]] = {}
    seen: set[int] = set()
    for name, cache in caches.items():
        if layouts.get(name) not in _PLAIN_CPU:
            raise ValueError(
                f"{name}: the memory layout of this attention ({layouts.get(name)!r}) cannot be said by strides; "
                "bfloat16 on a CPU with AMX has such a one: use --dtype float32 or float16"
            )
        if cache.data_ptr() in seen:
            continue  # a layer that uses the cache of another one
        seen.add(cache.data_ptr())
        if cache.dim() != 4 or cache.dtype not in _DTYPES or cache.stride()[2:] != (cache.shape[3], 1):
            raise ValueError(f"{name}: a cache of shape {tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype}")
        shapes.setdefault((tuple(cache.shape), cache.dtype), []).append((layer_index(name), cache))
    groups = []
    segments: dict[str, int] = {}
    for (shape, dtype), layers in shapes.items():
        layers.sort(key=lambda pair: pair[0])
        num_blocks, head_count, tokens, both = shape
        group = Group(
            [index for index, _ in layers], heads=head_count, head_dim=both // 2, block_tokens=tokens, num_blocks=num_blocks,
            dtype=_DTYPES[dtype], layout="HND", heads_total=heads.total, head_first=heads.first,
        )  # fmt: skip
        groups.append(group)
        told = group.to_proto(0, 0)
        for tensors, (_, cache) in zip(told.layers, layers, strict=True):
            segment, offset = memory.place(cache)
            place = segments.setdefault(segment.name, len(segments))
            _set_views(tensors, cache, place, offset)
        schema.groups.append(told)
    for name in segments:
        size = next(segment.size_bytes for segment in memory.segments if segment.name == name)
        schema.segments.add().posix_shm.CopyFrom(schema_pb2.PosixShmSegment(name=name, size_bytes=size))
    return schema, groups


def _set_views(tensors: schema_pb2.LayerTensors, cache: torch.Tensor, segment: int, offset: int) -> None:
    size = cache.element_size()
    _, _, tokens, both = cache.shape
    head_dim = both // 2
    for view, first, token_stride, dim_stride in (
        (tensors.k, 0, 1, tokens),
        (tensors.v, tokens * head_dim, head_dim, 1),
    ):
        view.segment = segment
        view.offset_bytes = offset + first * size
        view.block_stride_bytes = cache.stride(0) * size
        view.head_stride_bytes = cache.stride(1) * size
        view.token_stride_bytes = token_stride * size
        view.dim_stride_bytes = dim_stride * size


class CachePool(Pool):
    """vLLM's cache, registered; again by itself when the daemon restarts, for the memory is ours."""

    _restorable = True

    def __init__(self, client: Client, schema: schema_pb2.PoolSchema, groups: Sequence[Group]) -> None:
        super().__init__(client, schema, groups, 0)
