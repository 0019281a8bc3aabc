"""What further tiers could win, by the reference codec, which gives the same bytes as the product's (tests/golden).

An entropy coder behind the codec, on the KV of tests/data. Ideal: order-0 entropy of the codes, each tier's K and V apart.
Huffman: what zlib's Huffman-only mode really makes of the packed codes, and how fast one thread of it is; gigabytes are
those of raw KV, as everywhere.

Channel smoothing, on made-up keys with outliers: each channel of a run of 64 tokens divided by the power of two nearest to
the root of its RMS, before the rotation. Error of attention logits as in docs/quality.md, "Outliers".
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import zlib
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/golden"))

import reference  # noqa: E402

DATA = ROOT / "tests/data/smollm2_135m_wikitext2_256"
TIERS = {"Q8": 6, "Q4": 2, "Q3": 3, "Q2": 4}
BITS = {"Q8": 8, "Q4": 4, "Q3": 3, "Q2": 2}


def entropy(symbols: np.ndarray[Any, Any]) -> float:
    """Bits a symbol."""
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(share * np.log2(share)).sum())


def huffman(packed: bytes, raw_bytes: int) -> tuple[float, float, float]:
    """Size of what zlib makes of it, and the GB a second of raw KV it takes in and gives back."""
    begin = time.perf_counter()
    coder = zlib.compressobj(level=1, wbits=-15, strategy=zlib.Z_HUFFMAN_ONLY)
    coded = coder.compress(packed) + coder.flush()
    middle = time.perf_counter()
    assert zlib.decompress(coded, wbits=-15) == packed
    end = time.perf_counter()
    return len(coded) / len(packed), raw_bytes / (middle - begin) / 1e9, raw_bytes / (end - middle) / 1e9


def codes_of(plane: np.ndarray[Any, Any], tier: str, centred: bool) -> list[np.ndarray[Any, Any]]:
    """The codes of each cell of a plane, float32 [tokens, heads, head_dim]."""
    tokens, heads, head_dim = plane.shape
    mean = reference.centres(plane, np.full(tokens, TIERS[tier]))[2] if centred else None
    r = reference.rotation(head_dim)
    cells = []
    for t in range(tokens):
        for h in range(heads):
            z = reference.rotate(plane[t, h] if mean is None else plane[t, h] - mean[t // 64, h], r)
            cells.append((reference.rotated8(z, r) if tier == "Q8" else reference.rotated(z, r, BITS[tier]))[1])
    return cells


def run() -> int:
    meta = json.loads((DATA / "meta.json").read_text())
    kv = np.fromfile(DATA / "kv.f16", "<f2").reshape(meta["layers"], 2, meta["tokens"], meta["kv_heads"], meta["head_dim"])
    print("| codes | stored | ideal | saved | Huffman | saved | code GB/s | decode GB/s |\n|---|---|---|---|---|---|---|---|")
    for tier, bits in BITS.items():
        for which, plane in enumerate("KV"):
            cells = [cell for layer in kv for cell in codes_of(layer[which].astype(np.float32), tier, plane == "K")]
            ideal = entropy(np.stack(cells))
            size, code, decode = huffman(b"".join(reference.pack(cell, TIERS[tier]) for cell in cells), kv.nbytes // 2)
            print(f"| {tier} {plane} | {bits} | {ideal:.2f} | {1 - ideal / bits:.0%} | {bits * size:.2f} | {1 - size:.0%} | {code:.2f} "
                  f"| {decode:.2f} |")  # fmt: skip
    words(kv)
    smoothing()
    return 0


def words(kv: np.ndarray[Any, Any]) -> None:
    """RAW: float16 words, and the same values as bfloat16, by bytes."""
    as_float = np.ascontiguousarray(kv).astype(np.float32)
    rounded = (as_float.view(np.uint32) + 0x7FFF + (as_float.view(np.uint32) >> 16 & 1)) >> 16
    for name, word in (("RAW float16", kv.view(np.uint16)), ("RAW bfloat16", rounded.astype(np.uint16))):
        low, high = entropy(word & 0xFF), entropy(word >> 8)
        planes = (word & 0xFF).astype(np.uint8).tobytes() + (word >> 8).astype(np.uint8).tobytes()
        size, code, decode = huffman(planes, kv.nbytes)
        print(f"| {name} | 16 | {low + high:.2f} | {1 - (low + high) / 16:.0%} | {16 * size:.2f} | {1 - size:.0%} | {code:.2f} | {decode:.2f} |")


def coded(keys: np.ndarray[Any, Any], tier: str, smooth: bool) -> np.ndarray[Any, Any]:
    """keys [tokens, head_dim] as they arrive."""
    out = np.empty_like(keys)
    for first in range(0, len(keys), 64):
        run = keys[first : first + 64]
        share = np.ones(run.shape[1], np.float32)
        if smooth:
            rms = np.sqrt(((run - run.mean(0)) ** 2).mean(0))
            share = np.exp2(np.rint(np.log2(rms) / 2)).astype(np.float32)
        words = (run / share).astype(np.float16)[:, None, :]
        chunk = reference.encode(words, None, [TIERS[tier]] * len(run), None)
        out[first : first + 64] = reference.widen(reference.decode(chunk)[1], reference.F16)[:, 0] * share
    return out


def smoothing() -> None:
    rng = np.random.default_rng(7)
    print("\n| outliers | tier | as it is | smoothed |\n|---|---|---|---|")
    plain = rng.standard_normal((512, 64)).astype(np.float32)
    queries = rng.standard_normal((64, 64)).astype(np.float32)
    deviation = (plain @ queries.T).std(0).mean()
    for name, channels in (("none", 1), ("scale, x20", 20)):
        keys = plain.copy()
        keys[:, [3, 17, 40, 60]] *= channels
        for tier in ("Q8", "Q4"):
            wrong = [((coded(keys, tier, smooth) - keys) @ queries.T).std(0).mean() / deviation for smooth in (False, True)]
            print(f"| {name} | {tier} | {wrong[0]:.4f} | {wrong[1]:.4f} |")

