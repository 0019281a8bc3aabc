"""How a KV cache lies in memory: groups of layers, and the strides of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrumkv.v1 import schema_pb2

# Axes of a group, outermost first in memory: Layer, Plane (K then V), Block, Token, Head, Dim.
CANONICAL_AXES = "LPBTHD"
_LAYOUTS = {
    ("NHD", False): "LPBTHD",  # one K and one V tensor per layer, [num_blocks, block_tokens, heads, head_dim]
    ("HND", False): "LPBHTD",
    ("NHD", True): "LBPTHD",  # one tensor per layer, [num_blocks, 2, block_tokens, heads, head_dim]
    ("HND", True): "LBPHTD",
}
# numpy has no bfloat16: its arrays hold the words.
_NUMPY: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
_PROTO = {"float16": "DATA_TYPE_FLOAT16", "bfloat16": "DATA_TYPE_BFLOAT16", "float32": "DATA_TYPE_FLOAT32"}


class BlockTable(list[int]):
    """Block ids in token order, of which the first `skip_tokens` tokens belong to a prefix that is there already."""

    def __init__(self, blocks: Sequence[int], skip_tokens: int = 0) -> None:
        super().__init__(blocks)
        self.skip_tokens = skip_tokens


@dataclass(frozen=True)
class Group:
    """Layers that share one geometry.

    layers: indices of the layers in the model, ascending.
    heads, head_dim: KV heads this worker holds, values per head (a multiple of 8, 8..1024).
    block_tokens, num_blocks: tokens per block (page, 1..256), blocks of the cache.
    dtype: "float16", "bfloat16" (numpy arrays of uint16 words) or "float32".
    layout: "NHD" (token before head) or "HND"; fused: K and V of a block side by side, else in tensors of their own.
    axes: any other order of memory, a permutation of "LPBTHD" with the outermost axis first; overrides layout and
        fused. For example "BLPTHD" puts all layers of a block side by side.
    heads_total, head_first: all KV heads of the model and the first this worker holds (tensor parallelism).
    has_v: False for a single latent tensor per layer (MLA); the plane axis then has length 1.
    state: with has_v=False: state-space or convolution state, rows of any words. Travels as it is, in a pool of its own.
    sliding_window_tokens: only the last so many tokens are ever attended to; 0: all.
    """

    layers: Sequence[int]
    heads: int
    head_dim: int
    block_tokens: int
    num_blocks: int
    dtype: str = "float16"
    layout: str = "NHD"
    fused: bool = False
    axes: str = ""
    heads_total: int = 0
    head_first: int = 0
    has_v: bool = True
    sliding_window_tokens: int = 0
    state: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _NUMPY:
            raise ValueError(f"dtype must be one of {', '.join(_NUMPY)}, not {self.dtype!r}")
        if sorted(self.memory_axes) != sorted(CANONICAL_AXES):
            raise ValueError(f"axes must be a permutation of {CANONICAL_AXES!r}, not {self.axes!r}")
        if self.state and self.has_v:
            raise ValueError("state has one tensor per layer: has_v must be False")
        object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def memory_axes(self) -> str:
        if self.axes:
            return self.axes
        if (self.layout, self.fused) not in _LAYOUTS:
            raise ValueError(f"layout must be NHD or HND, not {self.layout!r}")
        return _LAYOUTS[self.layout, self.fused]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _NUMPY[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """[layers, planes, num_blocks, block_tokens, heads, head_dim]."""
        planes = 2 if self.has_v else 1
        return (len(self.layers), planes, self.num_blocks, self.block_tokens, self.heads, self.head_dim)

    @property
    def size_bytes(self) -> int:
        size = self.numpy_dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def blocks_after(self, blocks: Sequence[int], tokens: int) -> BlockTable:
        """The rest of a request's block table behind its first `tokens` tokens: what both sides name, with as many tokens
        less, where the receiver has those already. They are then neither sent nor touched, also where they end inside a
        block. The receiver must have that block for itself.
        """
        if not 0 <= tokens <= len(blocks) * self.block_tokens:
            raise ValueError(f"{tokens} tokens do not lie in {len(blocks)} blocks of {self.block_tokens}")
        return BlockTable(blocks[tokens // self.block_tokens :], tokens % self.block_tokens)

    def view(self, memory: NDArray[np.uint8], offset_bytes: int) -> NDArray[Any]:
        """The group's cache in `memory` from `offset_bytes` on, without a copy, in the order of `shape`."""
        order = [CANONICAL_AXES.index(axis) for axis in self.memory_axes]
        flat = memory[offset_bytes : offset_bytes + self.size_bytes].view(self.numpy_dtype)
        stored = flat.reshape([self.shape[axis] for axis in order])
        return stored.transpose([order.index(axis) for axis in range(len(order))])

    def to_proto(self, segment: int, offset_bytes: int) -> schema_pb2.LayerGroup:
        """The group's schema, its memory starting at `offset_bytes` of segment `segment`."""
        strides = self._strides()
        kind = "GROUP_KIND_ATTENTION" if self.has_v else "GROUP_KIND_OPAQUE_STATE" if self.state else "GROUP_KIND_MLA"
        if self.sliding_window_tokens:
            kind = "GROUP_KIND_SLIDING_WINDOW"
        group = schema_pb2.LayerGroup(
            kind=kind, data_type=_PROTO[self.dtype], heads_total=self.heads_total or self.heads,
            head_first=self.head_first, head_count=self.heads, head_dim=self.head_dim, block_tokens=self.block_tokens,
            num_blocks=self.num_blocks, sliding_window_tokens=self.sliding_window_tokens,
        )  # fmt: skip
        for index, layer in enumerate(self.layers):
            tensors = group.layers.add(layer=layer)
            for plane, tensor in enumerate((tensors.k, tensors.v)[: self.shape[1]]):
                tensor.segment = segment
                tensor.offset_bytes = offset_bytes + index * strides[0] + plane * strides[1]
                tensor.block_stride_bytes = strides[2]
                tensor.token_stride_bytes = strides[3]
                tensor.head_stride_bytes = strides[4]
                tensor.dim_stride_bytes = strides[5]
        return group

    def _strides(self) -> tuple[int, ...]:
        """Byte strides of the axes of `shape`."""
        extents = dict(zip(CANONICAL_AXES, self.shape, strict=True))
        strides, step = {}, self.numpy_dtype.itemsize
        for axis in reversed(self.memory_axes):
            strides[axis] = step
            step *= extents[axis]
        return tuple(strides[axis] for axis in CANONICAL_AXES)


def block_runs(blocks: Sequence[int], group: int = 0) -> schema_pb2.GroupBlocks:
    """Block ids in token order, as runs of consecutive ids."""
    skip = blocks.skip_tokens if isinstance(blocks, BlockTable) else 0
    out = schema_pb2.GroupBlocks(group=group, skip_tokens=skip)
    for block in blocks:
        if out.runs and out.runs[-1].first + out.runs[-1].count == block:
            out.runs[-1].count += 1
        else:
            out.runs.add(first=block, count=1)
    return out
