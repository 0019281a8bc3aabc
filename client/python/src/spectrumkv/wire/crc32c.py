"""CRC32C (Castagnoli), vectorised: the buffer is cut into lanes that advance together, then joined pairwise."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = np.uint32(0x82F63B78)
_WORDS_PER_LANE = 128
Table = NDArray[np.uint32]


def _byte_table() -> Table:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


def _slicing_tables() -> list[Table]:
    """tables[n][b]: the effect of byte b that has n bytes after it."""
    tables = [_byte_table()]
    for _ in range(3):
        tables.append((tables[-1] >> np.uint32(8)) ^ tables[0][tables[-1] & 0xFF])
    return tables


_TABLES = _slicing_tables()


def _apply(tables: list[Table], crc: Table) -> Table:
    """A linear map of 32 bits, given as one table per byte of the operand."""
    out: Table = (
        tables[0][crc & 0xFF]
        ^ tables[1][(crc >> np.uint32(8)) & 0xFF]
        ^ tables[2][(crc >> np.uint32(16)) & 0xFF]
        ^ tables[3][crc >> np.uint32(24)]
    )
    return out


@functools.lru_cache(maxsize=64)
def _zeros_operator(size: int) -> list[Table]:
    """The map "append `size` zero bytes", as tables. `size` is a multiple of four."""
    values = [np.arange(256, dtype=np.uint32) << np.uint32(8 * byte) for byte in range(4)]
    step = [_TABLES[3], _TABLES[2], _TABLES[1], _TABLES[0]]  # four zero bytes
    count = size // 4
    while count:
        if count & 1:
            values = [_apply(step, v) for v in values]
        step = [_apply(step, table) for table in step]
        count >>= 1
    return values


def _small(data: bytes, state: int) -> int:
    table = _TABLES[0]
    for byte in data:
        state = (state >> 8) ^ int(table[(state ^ byte) & 0xFF])
    return state


def crc32c(*parts: bytes) -> int:
    """CRC32C of the parts one after another; crc32c(b"123456789") is 0xE3069283."""
    data = b"".join(parts)
    lane_bytes = 4 * _WORDS_PER_LANE
    lanes = len(data) // lane_bytes
    state = 0xFFFFFFFF
    head = 0
    if lanes >= 2:
        words = np.frombuffer(data, "<u4", lanes * _WORDS_PER_LANE).reshape(lanes, _WORDS_PER_LANE).T.copy()
        crc = np.zeros(lanes, np.uint32)
        crc[0] = state
        slicing = [_TABLES[3], _TABLES[2], _TABLES[1], _TABLES[0]]
        for word in words:
            crc = _apply(slicing, crc ^ word)
        state = _join(crc, lane_bytes)
        head = lanes * lane_bytes
    return _small(data[head:], state) ^ 0xFFFFFFFF


def _join(crc: Table, lane_bytes: int) -> int:
    """The state after all lanes, from the states of each lane alone (only the first had a start value)."""
    size = 1 << (len(crc) - 1).bit_length()
    # Lanes of zero state in front change nothing: the map is linear and the real start value is in its own lane.
    crc = np.concatenate([np.zeros(size - len(crc), np.uint32), crc])
    while len(crc) > 1:
        crc = _apply(_zeros_operator(lane_bytes), crc[0::2]) ^ crc[1::2]
        lane_bytes *= 2
    return int(crc[0])
