"""Codes to bytes and back. Codes are int32 [cells, head_dim], already biased (Q4, Q3, Q2, P4: 0..15) or signed (P8, Q8)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spectrumkv.wire.arithmetic import Codes
from spectrumkv.wire.layout import Bytes, Tier


def _quarters(codes: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    return np.split(codes, 4, axis=1)


def _pack_two_bits(codes: NDArray[np.uint8]) -> Bytes:
    a, b, c, d = _quarters(codes)
    return (a | b << 2 | c << 4 | d << 6).astype(np.uint8)


def _unpack_two_bits(data: Bytes) -> NDArray[np.uint8]:
    return np.concatenate([(data >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1).astype(np.uint8)


def pack(codes: Codes, tier: Tier) -> Bytes:
    """[cells, code bytes of a cell]."""
    if tier in (Tier.P8, Tier.Q8):
        return codes.astype(np.int8).view(np.uint8)
    small = codes.astype(np.uint8)
    if tier in (Tier.Q4, Tier.P4):
        low, high = np.split(small, 2, axis=1)
        return (low | high << 4).astype(np.uint8)
    if tier == Tier.Q2:
        return _pack_two_bits(small)
    eighths = np.split(small >> 2, 8, axis=1)
    top = np.zeros_like(eighths[0])
    for bit, part in enumerate(eighths):
        top |= part << bit
    return np.concatenate([_pack_two_bits((small & 3).astype(np.uint8)), top], axis=1)


def unpack(data: Bytes, tier: Tier, head_dim: int) -> Codes:
    """The inverse of pack for `data` [cells, code bytes of a cell]."""
    if tier in (Tier.P8, Tier.Q8):
        return data.view(np.int8).astype(np.int32)
    if tier in (Tier.Q4, Tier.P4):
        return np.concatenate([data & 15, data >> 4], axis=1).astype(np.int32)
    if tier == Tier.Q2:
        return _unpack_two_bits(data).astype(np.int32)
    low = _unpack_two_bits(data[:, : head_dim // 4])
    top = data[:, head_dim // 4 :]
    high = np.concatenate([(top >> bit) & 1 for bit in range(8)], axis=1)
    return (low | high << 2).astype(np.int32)
