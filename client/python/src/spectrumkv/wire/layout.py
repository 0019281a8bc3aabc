"""Header, sections, sizes and cuts of a chunk: everything about its bytes that is not arithmetic."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
Bytes = NDArray[np.uint8]

HEADER_BYTES = 64
CRC_OFFSET = 60
SECTION_ALIGN = 16
CENTRE_TOKENS = 64
MAX_TOKENS = 4096
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_RAW_BYTES = 1 << 20
MAGIC = b"SKV1"
VERSION = 1

# magic, version, header_bytes, fence, chunk_index, group, layer, token_first, T, dtype, flags, H, D, R, centre_tokens,
# body_bytes, head_first, reserved.
_HEADER = struct.Struct("<4sHHQIHHIHBBHHHHIH14s")
assert _HEADER.size == CRC_OFFSET


class DType(enum.IntEnum):
    """Element type on the wire, with its id there."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3

    @property
    def word_bytes(self) -> int:
        return 4 if self is DType.FLOAT32 else 2

    @property
    def word_type(self) -> np.dtype[Any]:
        """uint16 or uint32, little-endian."""
        return np.dtype("<u4") if self is DType.FLOAT32 else np.dtype("<u2")


class Tier(enum.IntEnum):
    """Precision of a token's K or V, with its id in the tier map."""

    RAW = 0
    P8 = 1
    Q4 = 2
    Q3 = 3
    Q2 = 4
    P4 = 5
    Q8 = 6


ROTATED = (Tier.Q8, Tier.Q4, Tier.Q3, Tier.Q2)
PLAIN = (Tier.P8, Tier.P4)
# Tiers whose cells have a one-byte and a two-byte scale.
SCALE8 = (Tier.Q4, Tier.Q3, Tier.Q2)
SCALE16 = (Tier.Q8, Tier.P8, Tier.P4)
# Order of the code sections.
CODE_SECTIONS = (Tier.RAW, Tier.Q8, Tier.P8, Tier.P4, Tier.Q4, Tier.Q3, Tier.Q2)


class ChunkRefused(ValueError):
    """The bytes are no valid chunk. `reason` is the stable name of the first check that failed."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class ChunkHeader:
    """The header fields that are not implied by the others. Counts are tokens, heads and values."""

    token_count: int
    head_count: int
    head_dim: int
    dtype: DType
    has_v: bool = True
    fence: int = 0
    chunk_index: int = 0
    group: int = 0
    layer: int = 0
    token_first: int = 0
    head_first: int = 0

    def pack(self, body_bytes: int) -> bytes:
        """The first 60 bytes; the CRC32C follows."""
        return _HEADER.pack(
            MAGIC, VERSION, HEADER_BYTES, self.fence, self.chunk_index, self.group, self.layer, self.token_first,
            self.token_count, int(self.dtype), int(self.has_v), self.head_count, self.head_dim,
            rotation_of(self.head_dim), CENTRE_TOKENS, body_bytes, self.head_first, bytes(14),
        )  # fmt: skip


def rotation_of(head_dim: int) -> int:
    """The largest power of two that divides head_dim, at most 256."""
    return min(head_dim & -head_dim, 256)


def padded(size: int) -> int:
    return size + -size % SECTION_ALIGN


def runs_of(tokens: int) -> int:
    """Centring runs of a chunk."""
    return -(-tokens // CENTRE_TOKENS)


def unpack_header(data: bytes) -> tuple[ChunkHeader, int]:
    """The header and its body_bytes. Checks the header alone.

    Raises ChunkRefused with TRUNCATED, BAD_MAGIC, UNSUPPORTED_VERSION or BAD_HEADER.
    """
    if len(data) < HEADER_BYTES:
        raise ChunkRefused("TRUNCATED", f"{len(data)} bytes, a header has {HEADER_BYTES}")
    (magic, version, header_bytes, fence, chunk_index, group, layer, token_first, tokens, dtype, flags, heads, dim,
     rotation, centre, body_bytes, head_first, reserved) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise ChunkRefused("BAD_MAGIC", repr(magic))
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise ChunkRefused("UNSUPPORTED_VERSION", f"version {version}, header_bytes {header_bytes}")
    in_range = (
        1 <= tokens <= MAX_TOKENS
        and dtype in (1, 2, 3)
        and flags in (0, 1)
        and 1 <= heads <= MAX_HEADS
        and 8 <= dim <= MAX_HEAD_DIM
        and dim % 8 == 0
        and rotation == rotation_of(dim)
        and centre == CENTRE_TOKENS
        and not any(reserved)
    )
    if not in_range:
        raise ChunkRefused("BAD_HEADER", "a field is out of its range or a reserved byte is set")
    header = ChunkHeader(tokens, heads, dim, DType(dtype), bool(flags), fence, chunk_index, group, layer, token_first,
                         head_first)  # fmt: skip
    return header, body_bytes


def code_bytes(tier: Tier, head_dim: int, dtype: DType) -> int:
    """Code bytes of one cell."""
    if tier == Tier.RAW:
        return head_dim * dtype.word_bytes
    bits = {Tier.P8: 8, Tier.Q8: 8, Tier.Q4: 4, Tier.P4: 4, Tier.Q3: 3, Tier.Q2: 2}[tier]
    return head_dim * bits // 8


@dataclass(frozen=True)
class Section:
    """A section of the body: where it starts in the body, its bytes without padding."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Sections:
    """All sections of a body, in order, and its size."""

    tier_map: Section
    centre_scales: Section
    centre_codes: Section
    scales8: Section
    scales16: Section
    codes: dict[Tier, Section]
    body_bytes: int

    def in_order(self) -> list[tuple[str, Section]]:
        head = [(name, getattr(self, name)) for name in
                ("tier_map", "centre_scales", "centre_codes", "scales8", "scales16")]  # fmt: skip
        return head + [(f"codes {tier.name}", self.codes[tier]) for tier in CODE_SECTIONS]


def sections_of(tiers_k: Bytes, tiers_v: Bytes | None, heads: int, head_dim: int, dtype: DType) -> Sections:
    """The sections of a body whose tokens have these tiers (after escapes)."""
    tokens = len(tiers_k)
    counts = np.bincount(tiers_k, minlength=8).astype(np.int64)
    centred = bool(np.isin(tiers_k, ROTATED).any())
    if tiers_v is not None:
        counts += np.bincount(tiers_v, minlength=8)
    offset = 0

    def take(size: int) -> Section:
        nonlocal offset
        section = Section(offset, size)
        offset += padded(size)
        return section

    runs = runs_of(tokens) if centred else 0
    tier_map = take(tokens)
    centre_scales = take(runs * heads * 2)
    centre_codes = take(runs * heads * head_dim)
    scales8 = take(heads * sum(int(counts[t]) for t in SCALE8))
    scales16 = take(2 * heads * sum(int(counts[t]) for t in SCALE16))
    codes = {t: take(heads * int(counts[t]) * code_bytes(t, head_dim, dtype)) for t in CODE_SECTIONS}
    return Sections(tier_map, centre_scales, centre_codes, scales8, scales16, codes, offset)


def chunk_bytes(tiers_k: Bytes, tiers_v: Bytes | None, heads: int, head_dim: int, dtype: DType) -> int:
    """Wire bytes of a chunk with these tiers (uint8 [tokens], after escapes): header and body."""
    return HEADER_BYTES + sections_of(tiers_k, tiers_v, heads, head_dim, dtype).body_bytes


def tokens_per_chunk(heads: int, head_dim: int, dtype: DType, has_v: bool = True) -> int:
    """Tokens of a full chunk: at most 1 MiB of raw words, in multiples of 64 where that many fit."""
    token_bytes = heads * head_dim * dtype.word_bytes * (2 if has_v else 1)
    fitting = MAX_RAW_BYTES // token_bytes
    if fitting >= CENTRE_TOKENS:
        return min(fitting // CENTRE_TOKENS * CENTRE_TOKENS, MAX_TOKENS)
    return 1 << (fitting.bit_length() - 1) if fitting else 1


def cut_tokens(
    token_count: int, heads: int, head_dim: int, dtype: DType, has_v: bool = True
) -> list[tuple[int, int]]:
    """(first, count) of every chunk of one layer, counted in tokens that travel."""
    step = tokens_per_chunk(heads, head_dim, dtype, has_v)
    return [(first, min(step, token_count - first)) for first in range(0, token_count, step)]
