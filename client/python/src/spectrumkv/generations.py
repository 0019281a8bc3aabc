"""How a daemon sees that a block was written while it read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray


class BlockGenerations:
    """A sequence lock per block. Thread-safe; one process writes a pool's blocks.

    table: uint64 [num_blocks], shared with the daemon, indexed by block id over all groups. Odd while a block is being
    written; a transfer that meets an odd one, or one that grew while its block was read, fails with SOURCE_CHANGED.
    The order of stores is that of x86-64: other machines need a fence, which Python has not.
    """

    def __init__(self, table: NDArray[np.uint64]) -> None:
        self.table = table
        self._lock = threading.Lock()
        self._writers: dict[int, int] = {}

    @contextlib.contextmanager
    def writing(self, blocks: Iterable[int]) -> Iterator[None]:
        """The blocks may be written inside. Blocks may be in several such contexts at a time, also of one thread: the
        last one to end makes them even. Raises IndexError for a block that does not exist, before anything is marked.
        """
        ids = sorted(set(blocks))
        for block in ids[:1] + ids[-1:]:
            if not 0 <= block < len(self.table):
                raise IndexError(f"block {block} is not one of {len(self.table)}")
        self._enter(ids)
        try:
            yield
        finally:  # also where the writer failed: whatever it left is what the block holds now
            self._leave(ids)

    def _enter(self, ids: list[int]) -> None:
        with self._lock:
            for block in ids:
                self._writers[block] = self._writers.get(block, 0) + 1
                if self._writers[block] == 1:
                    self.table[block] += np.uint64(1)

    def _leave(self, ids: list[int]) -> None:
        with self._lock:
            for block in ids:
                self._writers[block] -= 1
                if self._writers[block] == 0:
                    del self._writers[block]
                    self.table[block] += np.uint64(1)
