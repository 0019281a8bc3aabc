"""Encode and decode one chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spectrumkv.wire import arithmetic as math
from spectrumkv.wire.crc32c import crc32c
from spectrumkv.wire.layout import (
    CRC_OFFSET,
    HEADER_BYTES,
    ROTATED,
    SCALE8,
    SCALE16,
    Bytes,
    ChunkHeader,
    ChunkRefused,
    DType,
    Section,
    Sections,
    Tier,
    Words,
    padded,
    runs_of,
    sections_of,
    unpack_header,
)
from spectrumkv.wire.packing import pack, unpack


@dataclass(frozen=True)
class DecodedChunk:
    """What a chunk carries. `k` and `v` are words [tokens, heads, head_dim]; `tiers_*` uint8 [tokens], after escapes."""

    header: ChunkHeader
    tiers_k: Bytes
    tiers_v: Bytes | None
    k: Words
    v: Words | None


def encode_chunk(
    k: Words, v: Words | None, tiers_k: Bytes, tiers_v: Bytes | None, dtype: DType, *, header: ChunkHeader | None = None
) -> bytes:
    """The bytes of a chunk: exactly those every encoder of the format must produce.

    k, v: words [tokens, heads, head_dim]; v is None where the layer has one tensor. tiers_k, tiers_v: requested tier
    ids [tokens]; tokens that no lossy tier can carry become RAW. `header` gives fence, indices and firsts; its
    dimensions are replaced by those of `k`.
    """
    tokens, heads, dim = k.shape
    header = replace(header or ChunkHeader(tokens, heads, dim, dtype), token_count=tokens, head_count=heads,
                     head_dim=dim, dtype=dtype, has_v=v is not None)  # fmt: skip
    words = k if v is None else np.concatenate([k, v])
    values = math.widen(np.ascontiguousarray(words), dtype)
    tiers = np.array(tiers_k if tiers_v is None or v is None else np.concatenate([tiers_k, tiers_v]), np.uint8)
    tiers[math.escapes_of(values, tiers)] = Tier.RAW
    final_k, final_v = tiers[:tokens], tiers[tokens:] if v is not None else None
    sections = sections_of(final_k, final_v, heads, dim, dtype)
    body = np.zeros(sections.body_bytes, np.uint8)
    _put(body, sections.tier_map, final_k if final_v is None else final_k | final_v << 4)
    centres = np.zeros_like(values)
    if sections.centre_codes.size:
        codes, scales = math.encode_centres(values[:tokens], np.isin(final_k, ROTATED))
        _put(body, sections.centre_scales, scales)
        _put(body, sections.centre_codes, codes)
        centres[:tokens] = math.centres_of(codes, scales, tokens)
    _encode_cells(body, sections, words, values, centres, tiers, tokens)
    head = header.pack(len(body))
    payload = body.tobytes()
    return head + crc32c(head, payload).to_bytes(4, "little") + payload


def _encode_cells(
    body: Bytes, sections: Sections, words: Words, values: math.Floats, centres: math.Floats, tiers: Bytes, k_rows: int
) -> None:
    """Scales and codes of all cells. Rows of `words`, `values`, `tiers` are the tokens' K, then the tokens' V."""
    rows, heads, dim = words.shape
    scales8 = np.zeros((rows, heads), np.uint8)
    scales16 = np.zeros((rows, heads), np.float16)
    for tier, section in sections.codes.items():
        chosen = np.flatnonzero(tiers == tier)
        if len(chosen) == 0:
            continue
        cells = values[chosen]
        if tier == Tier.RAW:
            _put(body, section, words[chosen])
            continue
        if tier in (Tier.P8, Tier.P4):
            codes, scales16[chosen] = math.encode_symmetric(cells, 127 if tier == Tier.P8 else 7)
            codes = codes + 8 if tier == Tier.P4 else codes
        else:
            # Values have no centre; subtracting +0 from them changes no bit of z or of its magnitude's order.
            centre = centres[chosen] if chosen[0] < k_rows else None
            if tier == Tier.Q8:
                codes, scales16[chosen] = math.encode_q8(cells, centre)
            else:
                codes, scales8[chosen] = math.encode_levels(cells, centre, tier)
        _put(body, section, pack(codes.reshape(-1, dim), tier))
    _put(body, sections.scales8, scales8[np.isin(tiers, SCALE8)])
    _put(body, sections.scales16, scales16[np.isin(tiers, SCALE16)])


def _put(body: Bytes, section: Section, data: NDArray[np.generic]) -> None:
    body[section.offset : section.end] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)


def decode_chunk(data: bytes, to: DType | None = None) -> DecodedChunk:
    """Checks `data` completely, then decodes it. Raises ChunkRefused with the reason of the first failed check.

    to: data type of the words that come out, for a pool of another one; None: that of the chunk.
    """
    header, body_bytes = unpack_header(data)
    if body_bytes != len(data) - HEADER_BYTES:
        raise ChunkRefused("BAD_LENGTH", f"body_bytes {body_bytes}, received {len(data) - HEADER_BYTES}")
    if crc32c(data[:CRC_OFFSET], data[HEADER_BYTES:]) != int.from_bytes(data[CRC_OFFSET:HEADER_BYTES], "little"):
        raise ChunkRefused("BAD_CHECKSUM", "CRC32C differs")
    body = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
    tiers_k, tiers_v = _read_tiers(header, body)
    sections = sections_of(tiers_k, tiers_v, header.head_count, header.head_dim, header.dtype)
    if body_bytes != sections.body_bytes:
        raise ChunkRefused("BAD_LENGTH", f"body_bytes {body_bytes}, the tier map asks for {sections.body_bytes}")
    _check_sections(body, sections)
    words = _decode_cells(header, body, sections, tiers_k, tiers_v, to or header.dtype)
    tokens = header.token_count
    return DecodedChunk(header, tiers_k, tiers_v, words[:tokens], words[tokens:] if header.has_v else None)


def _read_tiers(header: ChunkHeader, body: Bytes) -> tuple[Bytes, Bytes | None]:
    tokens = header.token_count
    if len(body) < padded(tokens):
        raise ChunkRefused("BAD_LENGTH", f"body_bytes {len(body)} for {tokens} tokens")
    tier_map = body[:tokens]
    tiers_k, tiers_v = (tier_map & 15).astype(np.uint8), (tier_map >> 4).astype(np.uint8)
    if (tiers_k > 6).any() or (tiers_v > 6).any():
        raise ChunkRefused("BAD_TIER", "a nibble above 6")
    if not header.has_v and tiers_v.any():
        raise ChunkRefused("BAD_TIER", "a V tier, and there is no V")
    return tiers_k, tiers_v if header.has_v else None


def _check_sections(body: Bytes, sections: Sections) -> None:
    for name, section in sections.in_order():
        if body[section.end : section.offset + padded(section.size)].any():
            raise ChunkRefused("BAD_PADDING", f"after {name}")
        data = body[section.offset : section.end]
        if name == "scales8" and (data >= 0xF8).any():
            raise ChunkRefused("BAD_SCALE", f"{name}: a byte above 0xF7")
        if name in ("centre_scales", "scales16") and not np.isfinite(data.view(np.float16)).all():
            raise ChunkRefused("BAD_SCALE", f"{name}: not finite")


def _decode_cells(
    header: ChunkHeader, body: Bytes, sections: Sections, tiers_k: Bytes, tiers_v: Bytes | None, to: DType
) -> Words:
    """Words of all cells, [tokens of K, then tokens of V][heads][head_dim]."""
    heads, dim, tokens = header.head_count, header.head_dim, header.token_count
    tiers = tiers_k if tiers_v is None else np.concatenate([tiers_k, tiers_v])
    words = np.zeros((len(tiers), heads, dim), to.word_type)
    scales8 = np.zeros((len(tiers), heads), np.uint8)
    scales16 = np.zeros((len(tiers), heads), np.float16)

    def get(section: Section) -> Bytes:
        return body[section.offset : section.end]

    scales8[np.isin(tiers, SCALE8)] = get(sections.scales8).reshape(-1, heads)
    scales16[np.isin(tiers, SCALE16)] = get(sections.scales16).view(np.float16).reshape(-1, heads)
    centres = None
    if sections.centre_codes.size:
        codes = get(sections.centre_codes).view(np.int8).reshape(runs_of(tokens), heads, dim)
        centres = math.centres_of(codes, get(sections.centre_scales).view(np.float16).reshape(-1, heads), tokens)
    for tier, section in sections.codes.items():
        for plane_first, plane_tiers in ((0, tiers[:tokens]), (tokens, tiers[tokens:])):
            # Cells of K come first in the section, then those of V.
            chosen = np.flatnonzero(plane_tiers == tier)
            if len(chosen) == 0:
                continue
            before = int((tiers[:plane_first] == tier).sum())
            cells = get(section).reshape((tiers == tier).sum(), -1)[before : before + len(chosen)]
            rows = chosen + plane_first
            centre = centres[chosen] if centres is not None and plane_first == 0 else None
            words[rows] = _decode_tier(cells, tier, header, scales8[rows], scales16[rows], centre, to)
    return words


def _decode_tier(
    cells: Bytes, tier: Tier, header: ChunkHeader, scales8: Bytes, scales16: NDArray[np.float16],
    centre: math.Floats | None, to: DType,
) -> Words:  # fmt: skip
    """Words of the tokens of one plane at one tier. cells: uint8 [tokens, heads * code bytes of a cell]."""
    heads, dim = header.head_count, header.head_dim
    shape = (len(cells), heads, dim)
    if tier == Tier.RAW:
        words: Words = np.ascontiguousarray(cells).view(header.dtype.word_type).reshape(shape)
        return math.convert(words, header.dtype, to)
    codes = unpack(np.ascontiguousarray(cells).reshape(len(cells) * heads, -1), tier, dim).reshape(shape)
    if tier == Tier.P8:
        values = math.decode_symmetric(codes, scales16)
    elif tier == Tier.P4:
        values = math.decode_symmetric(codes - 8, scales16)
    elif tier == Tier.Q8:
        values = math.decode_q8(codes, scales16, centre)
    else:
        values = math.decode_levels(codes, scales8, centre, tier)
    return math.narrow(values, to)
