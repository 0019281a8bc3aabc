"""Moves a KV cache between two real daemons, again and again, and refines what has arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from daemons import Pair
from numpy.typing import NDArray

import spectrumkv as skv

BLOCK_TOKENS = 16


@dataclass
class Landed:
    """What arrived, [layers, 2, kept tokens, heads, head_dim], and the share of the raw bytes that crossed the wire."""

    kv: NDArray[np.float16]
    wire: float


class NotExact(Exception):
    """A refinement of everything to RAW did not end with the source's words, or they came too early."""


def same_bits(a: NDArray[np.float16], b: NDArray[np.float16]) -> bool:
    return bool((a.view(np.uint16) == b.view(np.uint16)).all())


class Mover:
    """Sends the KV of one prefix after the other; a context manager. `model` names what is moved."""

    def __init__(self, pair: Pair, shape: tuple[int, ...], model: str) -> None:
        layers, _, self.tokens, heads, head_dim = shape
        self.peer = pair.decode.addresses.peer
        self.clients = [skv.Client(daemon.addresses.worker_socket) for daemon in (pair.prefill, pair.decode)]
        self.blocks = list(range(-(-self.tokens // BLOCK_TOKENS)))
        group = skv.Group(layers=range(layers), heads=heads, head_dim=head_dim, block_tokens=BLOCK_TOKENS,
                          num_blocks=len(self.blocks))  # fmt: skip
        self.pools = [client.shared_memory_pool([group], model=model) for client in self.clients]
        self._moved = 0
        self._raw_bytes = 1

    def load(self, kv: NDArray[np.float16]) -> None:
        self._raw_bytes = kv.nbytes
        self.pools[0].write_tokens(kv, self.blocks)

    def move(self, policy: Any, *, refinable: bool = False) -> Landed:
        self._moved += 1
        name = f"quality-{self._moved}"
        self.pools[1].segment.memory[:] = 0xA5
        self.clients[1].expect(name, pool=self.pools[1], token_count=self.tokens, blocks=self.blocks, accept_dropped=True,
                               refinable=refinable)  # fmt: skip
        self.clients[0].send(name, peer=self.peer, pool=self.pools[0], token_count=self.tokens, blocks=self.blocks,
                             policy=policy)  # fmt: skip
        report = self.clients[1].wait(name, timeout_s=120)
        kept = self.tokens - sum(run.count for run in report.dropped_tokens)
        return Landed(self.pools[1].read_tokens(kept, self.blocks), report.wire_bytes / self._raw_bytes)

    def move_and_refine(self, policy: Any) -> tuple[Landed, Landed]:
        """What arrives, and what the same blocks have once everything has been refined to RAW, staged, and then applied.

        `policy` retains the source. Raises NotExact unless the daemon says EXACT and the words are the source's, bit for bit.
        """
        base = self.move(policy, refinable=True)
        name, decode = f"quality-{self._moved}", self.clients[1]
        answer = decode.refine(name, name + ".exact")
        report = decode.wait(name + ".exact", timeout_s=120)
        if not same_bits(self.pools[1].read_tokens(self.tokens, self.blocks), base.kv):
            raise NotExact(f"{name}: blocks changed before the refinement was applied")
        applied = decode.apply_refinement(name + ".exact")
        refined = Landed(self.pools[1].read_tokens(self.tokens, self.blocks), report.wire_bytes / self._raw_bytes)
        for client in self.clients:
            client.release(name)
        if answer.cells_left or not applied.complete or not applied.exact:
            raise NotExact(f"{name}: {answer.cells_left} cells were left, and the daemon says {applied}")
        if not same_bits(refined.kv, self.pools[0].read_tokens(self.tokens, self.blocks)):
            raise NotExact(f"{name}: the daemon says EXACT, and the words are not the source's")
        return base, refined

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for pool in self.pools:
            pool.close()
        for client in self.clients:
            client.close()
