"""The two workers of the demo: one that has computed a KV cache, and one that needs it."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import Case, Prompt
from daemons import Pair
from numpy.typing import NDArray

import spectrumkv as skv
from spectrumkv import wire
from spectrumkv.v1 import report_pb2, worker_service_pb2

PREFILL_BLOCK_TOKENS = 16
DECODE_BLOCK_TOKENS = 32
_SPARE_BLOCKS = 3  # pools are this many times larger than the prompt
_POISON = 0xA5
_TIMEOUT_S = 60.0


@dataclass
class Outcome:
    """What one transfer did. Times are the decode worker's, in seconds from the prefill worker's Send."""

    case: Case
    sent: report_pb2.TransferReport
    received: report_pb2.TransferReport
    plan: worker_service_pb2.PlanResponse
    first_layer_s: float
    commit_s: float
    landed: NDArray[np.float16]  # [layers, 2, tokens, heads, head_dim]
    problems: list[str] = field(default_factory=list)


class Workers:
    """A prefill worker with the prompt in scattered blocks of its pool, and a decode worker with an empty pool."""

    def __init__(self, pair: Pair, prompt: Prompt) -> None:
        self.prompt = prompt
        self.peer = pair.decode.addresses.peer
        self.prefill = skv.Client(pair.prefill.addresses.worker_socket)
        self.decode = skv.Client(pair.decode.addresses.worker_socket)
        self._random = np.random.default_rng(1)
        self.sent_wire_bytes = 0
        try:
            self.source = self._pool(self.prefill, PREFILL_BLOCK_TOKENS, "NHD")
            self.target = self._pool(self.decode, DECODE_BLOCK_TOKENS, "HND")
        except BaseException:
            self.close()
            raise
        self.source_blocks = self._scattered(self.source, prompt.tokens)
        self.source.write_tokens(prompt.kv, self.source_blocks)

    def _pool(self, client: skv.Client, block_tokens: int, layout: str) -> skv.SharedMemoryPool:
        layers, _, tokens, heads, head_dim = self.prompt.kv.shape
        group = skv.Group(
            layers=range(layers), heads=heads, head_dim=head_dim, block_tokens=block_tokens,
            num_blocks=_SPARE_BLOCKS * -(-tokens // block_tokens), layout=layout,
        )  # fmt: skip
        return client.shared_memory_pool([group], model=self.prompt.name)

    def _scattered(self, pool: skv.SharedMemoryPool, tokens: int) -> list[int]:
        group = pool.groups[0]
        chosen = self._random.permutation(group.num_blocks)[: -(-tokens // group.block_tokens)]
        return [int(block) for block in chosen]

    def transfer(self, transfer_id: str, case: Case, *, corrupt: bool = False) -> Outcome:
        """One push of the prompt into blocks of the decode pool that held something else before.

        corrupt: flips one bit of what has landed, which verify() must notice.
        """
        tokens = case.tokens or self.prompt.tokens
        policy = case.to_policy(self.prompt)
        source_blocks = self.source_blocks[: -(-tokens // PREFILL_BLOCK_TOKENS)]
        blocks = self._scattered(self.target, tokens)
        plan = self.prefill.plan(self.source, tokens, source_blocks, policy)
        self.target.segment.memory[:] = _POISON
        self.decode.expect(transfer_id, pool=self.target, token_count=tokens, blocks=blocks)
        watch = _Watch(self.decode, transfer_id)
        start = time.perf_counter()
        self.prefill.send(transfer_id, peer=self.peer, pool=self.source, token_count=tokens, blocks=source_blocks,
                          policy=policy)  # fmt: skip
        received = watch.result()
        sent = self.prefill.wait(transfer_id, timeout_s=_TIMEOUT_S)
        self.sent_wire_bytes += sent.wire_bytes
        if corrupt:
            self.target.kv().view(np.uint16)[-1, 1, blocks[0], 5, 1, 7] ^= 1
        outcome = Outcome(case, sent, received, plan, watch.first_layer_at - start, watch.ended_at - start,
                          self.target.read_tokens(tokens, blocks))  # fmt: skip
        self._check_rest(outcome, blocks, tokens)
        return outcome

    def _check_rest(self, outcome: Outcome, blocks: list[int], tokens: int) -> None:
        """Blocks that nobody named are as they were; the rest of the last block is zero."""
        memory = self.target.kv().view(np.uint16)
        others = np.setdiff1d(np.arange(memory.shape[2]), blocks)
        if (memory[:, :, others] != _POISON * 0x101).any():
            outcome.problems.append("a block outside the transfer was written")
        used = tokens % DECODE_BLOCK_TOKENS
        if used and memory[:, :, blocks[-1], used:].any():
            outcome.problems.append("the rest of the last block is not zero")

    def close(self) -> None:
        """Pools first, then connections."""
        for name in ("source", "target"):
            pool = getattr(self, name, None)
            if pool is not None:
                pool.close()
        self.prefill.close()
        self.decode.close()


class _Watch:
    """Follows a transfer on a thread of its own and notes when its first layer and its end were seen."""

    def __init__(self, client: skv.Client, transfer_id: str) -> None:
        self.first_layer_at = self.ended_at = 0.0
        self._client = client
        self._transfer_id = transfer_id
        self._report: report_pb2.TransferReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._report = self._client.wait(self._transfer_id, timeout_s=_TIMEOUT_S, on_layers_ready=self._layers)
        except Exception as error:  # raised again by result()
            self._error = error
        self.ended_at = time.perf_counter()

    def _layers(self, layers: int) -> None:
        self.first_layer_at = self.first_layer_at or time.perf_counter()

    def result(self) -> report_pb2.TransferReport:
        self._thread.join()
        if self._report is None:
            raise self._error or RuntimeError("the watch ended without a report")
        return self._report


def verify(outcome: Outcome, prompt: Prompt) -> dict[str, Any]:
    """Checks an outcome against the Python implementation of the format; adds to its problems.

    The plan says the tier of every token; encoding and decoding the source at these tiers, with no line of the daemon's
    code, says every bit that must have landed and every byte that must have travelled.
    """
    tokens = outcome.case.tokens or prompt.tokens
    source = np.ascontiguousarray(prompt.kv[:, :, :tokens])
    tiers_k = _tier_ids(outcome.plan.token_tiers_k)
    tiers_v = _tier_ids(outcome.plan.token_tiers_v)
    expected = _expected(prompt, tokens, tiers_k.tobytes(), tiers_v.tobytes())
    landed = outcome.landed.view(np.uint16)
    note = outcome.problems.append
    different = int((landed != expected.words).sum())
    if different:
        note(f"{different} of {landed.size} values differ from what the format says")
    raw = np.stack([tiers_k == wire.Tier.RAW, tiers_v == wire.Tier.RAW])
    exact = landed == source.view(np.uint16)
    if not exact[:, raw].all():
        note("a RAW token is not what it was")
    counts = _counts(outcome.plan.token_tiers_k, outcome.plan.token_tiers_v, prompt.kv.shape[0])
    for side, report in (("sender", outcome.sent), ("receiver", outcome.received)):
        told = {tier.tier: (tier.k_tokens, tier.v_tokens) for tier in report.tiers if tier.k_tokens or tier.v_tokens}
        if told != counts and not expected.escaped:
            note(f"{side}: tokens per tier are {told}, the plan gives {counts}")
        if report.wire_bytes != expected.wire_bytes:
            note(f"{side}: {report.wire_bytes} wire bytes, the format gives {expected.wire_bytes}")
        if report.wire_bytes > outcome.case.budget * report.kv_bytes:
            note(f"{side}: {report.wire_bytes} wire bytes are above the budget")
    if outcome.plan.wire_bytes != expected.wire_bytes:
        note(f"plan: {outcome.plan.wire_bytes} wire bytes, the format gives {expected.wire_bytes}")
    if outcome.sent.kv_bytes != source.nbytes:
        note(f"{outcome.sent.kv_bytes} raw bytes, the source has {source.nbytes}")
    errors = relative_errors(source, outcome.landed, prompt.scores[:tokens])
    return {"errors": errors, "tiers_k": tiers_k, "tiers_v": tiers_v}


def _counts(tiers_k: Any, tiers_v: Any, layers: int) -> dict[int, tuple[int, int]]:
    """(K tokens, V tokens) of each v1.Tier, summed over layers."""
    tiers_k, tiers_v = list(tiers_k), list(tiers_v)
    return {tier: (layers * tiers_k.count(tier), layers * tiers_v.count(tier)) for tier in {*tiers_k, *tiers_v}}


@functools.lru_cache(maxsize=4)
def _expected(prompt: Prompt, tokens: int, tiers_k: bytes, tiers_v: bytes) -> wire.Expectation:
    """Of the first `tokens` tokens at these tier ids; the rounds of a case share it."""
    source = np.ascontiguousarray(prompt.kv[:, :, :tokens]).view(np.uint16)
    return wire.expected_words(
        source, np.frombuffer(tiers_k, np.uint8), np.frombuffer(tiers_v, np.uint8), wire.DType.FLOAT16
    )


def _tier_ids(tiers: Any) -> NDArray[np.uint8]:
    return np.array([wire.Tier[skv.tier_name(tier)] for tier in tiers], np.uint8)


def relative_errors(
    source: NDArray[np.float16], landed: NDArray[np.float16], scores: NDArray[np.float32]
) -> tuple[float, float, float]:
    """Root of the squared error over the squared values: of K, of V, and of V with tokens weighted by their scores."""
    exact, lossy = source.astype(np.float64), landed.astype(np.float64)
    error, energy = ((exact - lossy) ** 2).sum(axis=(0, 3, 4)), (exact**2).sum(axis=(0, 3, 4))  # [planes, tokens]
    k, v = np.sqrt(error.sum(axis=1) / energy.sum(axis=1))
    attended = np.sqrt((error[1] * scores).sum() / (energy[1] * scores).sum())
    return float(k), float(v), float(attended)
