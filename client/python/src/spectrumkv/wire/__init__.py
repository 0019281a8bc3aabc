"""The chunk format of proto/WIRE_FORMAT.md in numpy: an implementation of its own, written from that page.

It exists to check the daemon, and to compute what a transfer must leave in the destination. A `chunk` is one layer,
one range of tokens, some heads, K and V. Values are handled as *words*, the bits of the pool's data type: uint16 for
float16 and bfloat16, uint32 for float32, always shaped [tokens, heads, head_dim].
"""

from spectrumkv.wire.chunk import DecodedChunk, decode_chunk, encode_chunk
from spectrumkv.wire.expect import Expectation, expected_words
from spectrumkv.wire.layout import (
    ChunkHeader,
    ChunkRefused,
    DType,
    Tier,
    chunk_bytes,
    cut_tokens,
    tokens_per_chunk,
)

__all__ = [
    "ChunkHeader",
    "ChunkRefused",
    "DType",
    "DecodedChunk",
    "Expectation",
    "Tier",
    "chunk_bytes",
    "cut_tokens",
    "decode_chunk",
    "encode_chunk",
    "expected_words",
    "tokens_per_chunk",
]
