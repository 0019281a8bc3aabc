"""Tensor parallelism of different sizes: which heads go from which worker to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HeadSlice:
    """KV heads first .. first + count - 1 of the model, from worker `source` to worker `target`."""

    source: int
    target: int
    first: int
    count: int


def head_ranges(heads_total: int, size: int) -> list[range]:
    """The heads of each rank where ranks have as even shares as there are, larger ones first; where there are more ranks
    than heads, neighbours have the same head."""
    if heads_total < 1 or size < 1:
        raise ValueError(f"heads and ranks must be at least 1, not {heads_total} and {size}")
    if size > heads_total:
        return [range(rank * heads_total // size, rank * heads_total // size + 1) for rank in range(size)]
    share, more = divmod(heads_total, size)
    firsts = [rank * share + min(rank, more) for rank in range(size + 1)]
    return [range(firsts[rank], firsts[rank + 1]) for rank in range(size)]


def head_slices(sources: Sequence[range], targets: Sequence[range]) -> list[HeadSlice]:
    """The transfers that give every target all its heads, each head once: a transfer for each slice, between the pools
    that SharedMemoryPool.head_view(first, count) makes on both sides.

    sources, targets: the heads of each worker, as head_ranges gives them. A head that several sources have is taken from
    the one whose slice it continues, or else the first. Raises ValueError for a head that no source has.
    """
    slices: list[HeadSlice] = []
    for target, wanted in enumerate(targets):
        fresh = True  # slices do not go on over targets
        for head in wanted:
            last = slices[-1] if slices and not fresh else None
            if last is not None and head in sources[last.source]:
                slices[-1] = replace(last, count=last.count + 1)
                continue
            source = next((rank for rank, held in enumerate(sources) if head in held), None)
            if source is None:
                raise ValueError(f"no source has head {head}")
            slices.append(HeadSlice(source, target, head, 1))
            fresh = False
    return slices
