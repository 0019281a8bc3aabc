"""The arithmetic of the tiers. IEEE float32, every operation rounded to nearest even by itself.

Cells are float32 arrays [n, heads, head_dim]; scales have one entry per cell, [n, heads]. Subtracted and added centres
have the shape of the cells; None means that there is nothing to subtract or add.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectrumkv.wire.layout import CENTRE_TOKENS, DType, Tier, Words, rotation_of, runs_of

Floats = NDArray[np.float32]
Codes = NDArray[np.int32]
_F = np.float32

LEVEL_BITS = {Tier.Q4: 4, Tier.Q3: 3, Tier.Q2: 2}


def widen(words: Words, dtype: DType) -> Floats:
    if dtype == DType.FLOAT16:
        return words.view(np.float16).astype(np.float32)
    if dtype == DType.BFLOAT16:
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.float32)


def narrow(values: Floats, dtype: DType) -> Words:
    """To nearest even, saturating at the largest finite value. `values` are finite."""
    if dtype == DType.FLOAT32:
        return values.view(np.uint32)
    if dtype == DType.FLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            half = values.astype(np.float16)
        largest = np.float16(65504)
        return np.clip(half, -largest, largest).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    overflow = (rounded & 0x7FFF) > 0x7F7F
    return np.where(overflow, (rounded & 0x8000) | 0x7F7F, rounded).astype(np.uint16)


def convert(words: Words, source: DType, target: DType) -> Words:
    """RAW words on their way into a pool of another data type: finite values are narrowed, infinities stay, a NaN
    becomes the quiet NaN of its sign."""
    if source == target:
        return words
    values = widen(np.ascontiguousarray(words), source)
    out = narrow(np.where(np.isfinite(values), values, _F(0)), target)
    shift = 8 * target.word_bytes - 1
    infinity, quiet = {DType.FLOAT16: (0x7C00, 0x7E00), DType.BFLOAT16: (0x7F80, 0x7FC0)}.get(
        target, (0x7F800000, 0x7FC00000)
    )
    special = (np.signbit(values).astype(np.uint32) << np.uint32(shift)) | np.where(
        np.isnan(values), np.uint32(quiet), np.uint32(infinity)
    )
    return np.where(np.isfinite(values), out, special).astype(target.word_type)


def to_half(values: Floats) -> NDArray[np.float16]:
    with np.errstate(under="ignore"):
        return values.astype(np.float16)


def half_values(scales: NDArray[np.float16]) -> Floats:
    return scales.astype(np.float32)


def rotate(values: Floats) -> Floats:
    """The butterflies, on every run of R values of the last axis; not normalised."""
    dim = values.shape[-1]
    rotation = rotation_of(dim)
    out = values
    h = 1
    while h < rotation:
        pairs = out.reshape(*values.shape[:-1], dim // (2 * h), 2, h)
        out = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        h *= 2
    return out.reshape(values.shape)


def _clip_share(bits: int, head_dim: int) -> np.float32:
    """C_b of the format: where the outermost level lies, as a share of the cell's largest magnitude."""
    column = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    shares = {4: (17 / 128, 1 / 8, 1 / 8), 3: (1 / 4, 15 / 64, 29 / 128), 2: (15 / 32, 13 / 32, 3 / 8)}
    return _F(shares[bits][column])


def _absmax(values: Floats) -> Floats:
    return np.asarray(np.abs(values).max(axis=-1))


def _reciprocal(scales: Floats) -> Floats:
    """1/s, and 0 where s is 0 (its codes are replaced afterwards)."""
    return np.divide(_F(1), scales, out=np.zeros_like(scales), where=scales != 0)


def encode_symmetric(cells: Floats, largest: int) -> tuple[Codes, NDArray[np.float16]]:
    """Codes in [-largest, largest] and the scale of each cell; all 0 where the scale is 0."""
    scales = to_half(_absmax(cells) / _F(largest))
    inverse = _reciprocal(half_values(scales))
    codes = np.clip(np.rint(cells * inverse[..., None]), -largest, largest).astype(np.int32)
    return codes, scales


def decode_symmetric(codes: Codes, scales: NDArray[np.float16]) -> Floats:
    return codes.astype(np.float32) * half_values(scales)[..., None]


def encode_levels(cells: Floats, centre: Floats | None, tier: Tier) -> tuple[Codes, NDArray[np.uint8]]:
    """Q4, Q3, Q2: codes in [0, 2^b) and the scale byte of each cell."""
    bits = LEVEL_BITS[tier]
    dim = cells.shape[-1]
    rotation = _F(rotation_of(dim))
    z = rotate(cells if centre is None else cells - centre)
    t = _absmax(z) * _clip_share(bits, dim)
    half_bits = to_half((t / rotation) * _F(64)).view(np.uint16)
    scale_bytes = ((half_bits.astype(np.uint32) + 64) >> 7).astype(np.uint8)
    inverse = _reciprocal(_step(scale_bytes) * rotation)
    middle = 1 << (bits - 1)
    floors = np.clip(np.floor(z * inverse[..., None]), -middle, middle - 1)
    codes = np.where((scale_bytes == 0)[..., None], middle, floors.astype(np.int32) + middle).astype(np.int32)
    return codes, scale_bytes


def _step(scale_bytes: NDArray[np.uint8]) -> Floats:
    return half_values((scale_bytes.astype(np.uint16) << np.uint16(7)).view(np.float16)) / _F(64)


def decode_levels(codes: Codes, scale_bytes: NDArray[np.uint8], centre: Floats | None, tier: Tier) -> Floats:
    half_step = _F((1 << (LEVEL_BITS[tier] - 1)) - 0.5)
    y = rotate((codes.astype(np.float32) - half_step) * _step(scale_bytes)[..., None])
    return y if centre is None else y + centre


def encode_q8(cells: Floats, centre: Floats | None) -> tuple[Codes, NDArray[np.float16]]:
    rotation = _F(rotation_of(cells.shape[-1]))
    z = rotate(cells if centre is None else cells - centre)
    scales = to_half(((_absmax(z) / _F(127)) / rotation) * _F(64))
    inverse = _reciprocal((half_values(scales) / _F(64)) * rotation)
    return np.clip(np.rint(z * inverse[..., None]), -127, 127).astype(np.int32), scales


def decode_q8(codes: Codes, scales: NDArray[np.float16], centre: Floats | None) -> Floats:
    y = rotate(codes.astype(np.float32) * (half_values(scales) / _F(64))[..., None])
    return y if centre is None else y + centre


def encode_centres(keys: Floats, rotated: NDArray[np.bool_]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Channel means of the keys whose token is `rotated` [tokens], by runs of 64 tokens.

    Codes [runs, heads, head_dim] and scales [runs, heads]. Keys of other tokens may hold anything.
    """
    tokens, heads, dim = keys.shape
    runs = runs_of(tokens)
    codes = np.zeros((runs, heads, dim), np.int8)
    scales = np.zeros((runs, heads), np.float16)
    for run in range(runs):
        chosen = np.flatnonzero(rotated[run * CENTRE_TOKENS : (run + 1) * CENTRE_TOKENS]) + run * CENTRE_TOKENS
        if len(chosen) == 0:
            continue
        total = np.zeros((heads, dim), np.float32)
        for token in chosen:  # in token order: float addition does not associate
            total = total + keys[token]
        run_codes, run_scales = encode_symmetric(total / _F(len(chosen)), 127)
        codes[run], scales[run] = run_codes, run_scales
    return codes, scales


def centres_of(codes: NDArray[np.int8], scales: NDArray[np.float16], tokens: int) -> Floats:
    """The centre to subtract or add, for every token: [tokens, heads, head_dim]."""
    means = codes.astype(np.float32) * half_values(scales)[..., None]
    return np.repeat(means, CENTRE_TOKENS, axis=0)[:tokens]


def escapes_of(values: Floats, tiers: NDArray[Any]) -> NDArray[np.bool_]:
    """Tokens [tokens] that only RAW can carry: not finite, or too large for their tier."""
    with np.errstate(invalid="ignore"):
        largest = np.abs(values).max(axis=(1, 2))  # NaN where any value is NaN
    rotated = np.isin(tiers, [Tier.Q8, Tier.Q4, Tier.Q3, Tier.Q2])
    plain = np.isin(tiers, [Tier.P8, Tier.P4])
    with np.errstate(invalid="ignore"):
        return np.asarray(~np.isfinite(largest) | (rotated & (largest > 1024)) | (plain & (largest > 65504)))
