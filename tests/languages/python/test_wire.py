"""spectrumkv.wire against the golden vectors, and where the vectors do not reach."""

import json
import pathlib

import numpy as np
import pytest

from spectrumkv import wire
from spectrumkv.wire.crc32c import crc32c
from spectrumkv.wire.layout import sections_of

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "golden" / "vectors"
INDEX = json.loads((VECTORS / "index.json").read_text())


def read(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def planes(case: dict, suffix: str):
    """K and V words [tokens, heads, head_dim] of a vector's .in or .out file; V is None where absent."""
    dtype = wire.DType(case["dtype"])
    shape = (2 if case["v_present"] else 1, case["tokens"], case["heads"], case["head_dim"])
    words = np.frombuffer(read(case["name"] + suffix), dtype.word_type).reshape(shape)
    return words[0], words[1] if case["v_present"] else None


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["name"])


def test_the_vectors_are_all_here():
    assert len(INDEX["cases"]) >= 60
    assert len(INDEX["decode_only"]) >= 8
    assert len(INDEX["must_fail"]) >= 30


@by_name(INDEX["cases"])
def test_encodes_the_vector_byte_for_byte(case):
    k, v = planes(case, ".in")
    asked = np.frombuffer(read(case["name"] + ".tiers"), np.uint8)
    header = wire.ChunkHeader(
        1, 1, 8, wire.DType.FLOAT16, fence=case["fence"], chunk_index=case["chunk_index"], group=case["group"],
        layer=case["layer"], token_first=case["token_first"], head_first=case["head_first"],
    )  # fmt: skip
    tiers_v = asked >> 4 if v is not None else None
    assert wire.encode_chunk(k, v, asked & 15, tiers_v, wire.DType(case["dtype"]), header=header) == read(
        case["name"] + ".chunk"
    )


@by_name(INDEX["cases"] + INDEX["decode_only"])
def test_decodes_the_vector_bit_for_bit(case):
    chunk = wire.decode_chunk(read(case["name"] + ".chunk"))
    k, v = planes(case, ".out")
    assert chunk.k.tobytes() == k.tobytes()
    assert (chunk.v is None) == (v is None)
    if v is not None:
        assert chunk.v.tobytes() == v.tobytes()


@by_name(INDEX["cases"])
def test_counts_escapes_and_sizes_as_the_vector(case):
    data = read(case["name"] + ".chunk")
    chunk = wire.decode_chunk(data)
    asked = np.frombuffer(read(case["name"] + ".tiers"), np.uint8)
    escaped = int((chunk.tiers_k != asked & 15).sum())
    escaped += 0 if chunk.tiers_v is None else int((chunk.tiers_v != asked >> 4).sum())
    assert escaped == case["escaped_tokens"]
    header = chunk.header
    assert wire.chunk_bytes(chunk.tiers_k, chunk.tiers_v, header.head_count, header.head_dim, header.dtype) == len(data)
    for field in ("fence", "chunk_index", "group", "layer", "token_first", "head_first"):
        assert getattr(header, field) == case[field]


@by_name(INDEX["must_fail"])
def test_refuses_with_the_named_reason(case):
    with pytest.raises(wire.ChunkRefused) as refused:
        wire.decode_chunk(read(f"must_fail/{case['name']}.chunk"))
    assert refused.value.reason == case["reason"]


def test_every_flipped_bit_of_a_small_chunk_is_refused():
    good = read("tokens_1.chunk")
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.ChunkRefused):
            wire.decode_chunk(bytes(bad))


def test_every_truncation_is_refused():
    good = read("tokens_2.chunk")
    for size in range(len(good)):
        with pytest.raises(wire.ChunkRefused) as refused:
            wire.decode_chunk(good[:size])
        assert refused.value.reason == ("TRUNCATED" if size < 64 else "BAD_LENGTH")


def crc32c_bitwise(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_known_values():
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [1, 511, 512, 513, 1023, 1024, 1025, 1536, 2048, 2560, 5000, 8191])
def test_crc32c_lanes_agree_with_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert crc32c(data) == crc32c_bitwise(data)
    assert crc32c(data[: size // 3], data[size // 3 :]) == crc32c_bitwise(data)


@pytest.mark.parametrize(
    "heads, head_dim, dtype, has_v, expected",
    [
        (3, 64, wire.DType.FLOAT16, True, 1344),  # 1 MiB / 768 = 1365
        (8, 128, wire.DType.FLOAT16, True, 256),  # exactly 1 MiB
        (8, 128, wire.DType.FLOAT32, True, 128),
        (32, 128, wire.DType.FLOAT16, True, 64),
        (33, 128, wire.DType.FLOAT16, True, 32),  # 62 fit: the power of two below
        (1, 8, wire.DType.FLOAT16, False, 4096),  # 65536 fit
        (128, 1024, wire.DType.FLOAT32, True, 1),  # exactly one fits
        (1024, 1024, wire.DType.FLOAT32, True, 1),  # none fits, one travels
    ],
)
def test_tokens_of_a_chunk(heads, head_dim, dtype, has_v, expected):
    assert wire.tokens_per_chunk(heads, head_dim, dtype, has_v) == expected


def test_cuts_cover_the_tokens_once():
    assert wire.cut_tokens(3000, 3, 64, wire.DType.FLOAT16) == [(0, 1344), (1344, 1344), (2688, 312)]
    assert wire.cut_tokens(1344, 3, 64, wire.DType.FLOAT16) == [(0, 1344)]


def test_size_of_a_chunk_by_hand():
    # 17 tokens, 2 heads, D = 64: 16 K at Q4, one K and all V at RAW.
    k = np.full(17, wire.Tier.Q4, np.uint8)
    k[3] = wire.Tier.RAW
    v = np.zeros(17, np.uint8)
    got = sections_of(k, v, 2, 64, wire.DType.FLOAT16)
    assert (got.tier_map.size, got.centre_scales.size, got.centre_codes.size) == (17, 4, 128)
    assert (got.scales8.size, got.scales16.size) == (32, 0)
    assert got.codes[wire.Tier.RAW].size == 2 * 18 * 128
    assert got.codes[wire.Tier.Q4].size == 2 * 16 * 32
    assert got.body_bytes == 32 + 16 + 128 + 32 + 2 * 18 * 128 + 2 * 16 * 32


@pytest.mark.parametrize("dtype", list(wire.DType))
def test_expected_words_cuts_and_counts(dtype):
    rng = np.random.default_rng(3)
    tokens, heads, dim = 150, 40, 128  # more than one chunk of 64 or 32 tokens
    values = rng.normal(size=(2, 2, tokens, heads, dim)).astype(np.float32)
    if dtype == wire.DType.BFLOAT16:
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        words = values.astype(np.float16 if dtype == wire.DType.FLOAT16 else np.float32).view(dtype.word_type)
    tiers = np.full(tokens, wire.Tier.Q4, np.uint8)
    tiers[:4] = wire.Tier.RAW
    got = wire.expected_words(words, tiers, tiers, dtype)
    cuts = wire.cut_tokens(tokens, heads, dim, dtype)
    assert len(cuts) > 1 and got.chunks == 2 * len(cuts) and got.escaped == 0
    assert (got.words[:, :, :4] == words[:, :, :4]).all()
    one = wire.encode_chunk(words[1, 0, :32], words[1, 1, :32], tiers[:32], tiers[:32], dtype)
    assert len(one) == wire.chunk_bytes(tiers[:32], tiers[:32], heads, dim, dtype)
    assert (got.words[:, :, 4:] != words[:, :, 4:]).mean() > 0.5
    assert got.wire_bytes < 0.35 * words.nbytes


def test_nonfinite_values_come_out_as_they_went_in():
    words = np.zeros((1, 2, 70, 1, 8), np.uint16)
    words[0, 0, 5, 0, 1], words[0, 1, 66, 0, 7] = 0x7C01, 0xFC00
    tiers = np.full(70, wire.Tier.Q2, np.uint8)
    got = wire.expected_words(words, tiers, tiers, wire.DType.FLOAT16)
    assert got.escaped == 2
    assert got.words[0, 0, 5, 0, 1] == 0x7C01 and got.words[0, 1, 66, 0, 7] == 0xFC00


@pytest.mark.parametrize("source, word, target, converted", [
    ("FLOAT16", 0x3C00, "BFLOAT16", 0x3F80),
    ("FLOAT16", 0x3C01, "BFLOAT16", 0x3F80),  # rounded
    ("FLOAT16", 0x7C00, "BFLOAT16", 0x7F80),
    ("FLOAT16", 0xFC00, "FLOAT32", 0xFF800000),
    ("FLOAT16", 0xFE55, "BFLOAT16", 0xFFC0),  # a NaN becomes the quiet one of its sign
    ("FLOAT16", 0x8001, "FLOAT32", 0xB3800000),
    ("BFLOAT16", 0x7F7F, "FLOAT16", 0x7BFF),  # saturates
    ("BFLOAT16", 0x8000, "FLOAT16", 0x8000),
    ("BFLOAT16", 0x7F81, "BFLOAT16", 0x7F81),  # the same type: bit for bit
    ("FLOAT32", 0xFF7FFFFF, "BFLOAT16", 0xFF7F),
    ("FLOAT32", 0x7FC00001, "FLOAT16", 0x7E00),
])  # fmt: skip
def test_raw_words_on_their_way_into_another_type(source, word, target, converted):
    dtype, to = wire.DType[source], wire.DType[target]
    k = np.full((3, 2, 8), word, dtype.word_type)
    tiers = np.zeros(3, np.uint8)
    decoded = wire.decode_chunk(wire.encode_chunk(k, k, tiers, tiers, dtype), to)
    assert decoded.k.dtype == to.word_type
    assert (decoded.k == converted).all() and (decoded.v == converted).all()
