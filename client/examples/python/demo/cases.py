"""The real KV cache, and the ways it is sent."""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import spectrumkv as skv
from spectrumkv.v1 import policy_pb2


@dataclass(frozen=True, eq=False)
class Prompt:
    """A captured prompt. kv: float16 [layers, 2, tokens, heads, head_dim]; scores: importance, float32 [tokens]."""

    name: str
    kv: NDArray[np.float16]
    scores: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return self.kv.shape[2]


def load_prompt(folder: pathlib.Path) -> Prompt:
    meta = json.loads((folder / "meta.json").read_text())
    layers, tokens = meta["layers"], meta["tokens"]
    shape = (layers, 2, tokens, meta["kv_heads"], meta["head_dim"])
    kv = np.fromfile(folder / "kv.f16", "<f2").reshape(shape)
    attention = np.fromfile(folder / "attention_mean.f32", "<f4").reshape(layers, tokens)
    # The file sums over queries. Token j is seen by tokens - j of them: without the division early tokens always win.
    scores = attention.mean(axis=0) / (tokens - np.arange(tokens))
    return Prompt(meta["model"].split(" ")[0], kv, scores.astype(np.float32))


@dataclass(frozen=True)
class Case:
    """One way to send the prompt, or its first `tokens` tokens (0: all)."""

    label: str
    budget: float
    policy: dict[str, Any]
    tokens: int = 0

    def to_policy(self, prompt: Prompt) -> policy_pb2.Policy:
        """The policy; "scores" in it stands for the prompt's."""
        options = dict(self.policy, budget=self.budget)
        if options.pop("scores", False):
            options["scores"] = prompt.scores[: self.tokens or prompt.tokens]
        return skv.policy(**options)


def _greedy(budget: float, tokens: int = 0) -> Case:
    label = f"GREEDY, {tokens} tokens" if tokens else "GREEDY by attention"
    return Case(label, budget, {"allocator": "GREEDY", "scores": True}, tokens)


CASES = (
    Case("RAW", 1.1, {"allocator": "RAW"}),
    _greedy(0.5),
    _greedy(0.3),
    _greedy(0.25),
    _greedy(0.2),
    Case("GREEDY by key norm", 0.25, {"allocator": "GREEDY", "importance": "KEY_NORM"}),
    Case("RANDOM", 0.25, {"allocator": "RANDOM", "random_seed": 7}),
    Case("SINK_PROTECT", 0.25, {"allocator": "SINK_PROTECT", "scores": True}),
    Case("UNIFORM Q4", 0.3, {"allocator": "UNIFORM", "uniform_tier": "Q4"}),
    Case("GREEDY, INT8 + INT4", 0.3, {"allocator": "GREEDY", "tiers": ["RAW", "P8", "P4"], "scores": True}),
    _greedy(0.3, tokens=250),
)
