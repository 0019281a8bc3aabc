"""What a transfer must leave in its destination, computed without the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrumkv.wire.chunk import decode_chunk, encode_chunk
from spectrumkv.wire.layout import Bytes, DType, Words, cut_tokens


@dataclass(frozen=True)
class Expectation:
    """`words` [layers, planes, tokens, heads, head_dim]; `wire_bytes` and `chunks` of all chunks; `escaped` counts
    (layer, token, plane) that became RAW against the request."""

    words: Words
    wire_bytes: int
    chunks: int
    escaped: int


def expected_words(
    kv: Words, tiers_k: Bytes, tiers_v: Bytes | None, dtype: DType, chunk_tokens: Sequence[tuple[int, int]] | None = None,
    to: DType | None = None,
) -> Expectation:  # fmt: skip
    """Encodes and decodes every chunk of a transfer.

    kv: words [layers, planes, tokens, heads, head_dim], planes 2 (K, V) or 1, only the tokens that travel. tiers_k,
    tiers_v: tier ids before escapes, [tokens] where they are the same in every layer, or [layers, tokens].
    to: data type of the destination; None: `dtype`.
    """
    layers, planes, tokens, heads, dim = kv.shape
    cuts = chunk_tokens or cut_tokens(tokens, heads, dim, dtype, planes == 2)
    per_layer_k = np.broadcast_to(tiers_k, (layers, tokens))
    per_layer_v = np.broadcast_to(tiers_v, (layers, tokens)) if tiers_v is not None else None
    words = np.empty(kv.shape, (to or dtype).word_type)
    wire_bytes = escaped = 0
    for layer in range(layers):
        for first, count in cuts:
            span = slice(first, first + count)
            v = kv[layer, 1, span] if planes == 2 else None
            asked_v = per_layer_v[layer, span] if per_layer_v is not None else None
            chunk = encode_chunk(kv[layer, 0, span], v, per_layer_k[layer, span], asked_v, dtype)
            decoded = decode_chunk(chunk, to)
            words[layer, 0, span] = decoded.k
            escaped += int((decoded.tiers_k != per_layer_k[layer, span]).sum())
            if decoded.v is not None and decoded.tiers_v is not None and asked_v is not None:
                words[layer, 1, span] = decoded.v
                escaped += int((decoded.tiers_v != asked_v).sum())
            wire_bytes += len(chunk)
    return Expectation(words, wire_bytes, layers * len(cuts), escaped)
