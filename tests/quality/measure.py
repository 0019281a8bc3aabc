"""Scores of every variant on every segment and needle, through two real daemons; written as they come."""

from __future__ import annotations

import json
import pathlib
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from corpus import Needle, Segment
from model import Model, Prefill
from mover import Mover
from variants import Variant

import spectrumkv as skv


@dataclass
class Results:
    """about: what was run. rows: by variant, one entry for each segment: wire, kl, change (of perplexity, in %), top1.
    needles: by variant, and "exact", one entry for each trial: whether the answer was right.
    perplexity: over exact KV, one entry for each segment. spread: of the first segment's keys, see key_spread."""

    about: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    needles: dict[str, list[bool]] = field(default_factory=dict)
    perplexity: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)

    def save(self, path: pathlib.Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(vars(self), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: pathlib.Path) -> Results:
        return Results(**json.loads(path.read_text(encoding="utf-8")))


def version(program: pathlib.Path) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def policy_of(variant: Variant, prefill: Prefill) -> Any:
    options = dict(variant.policy, budget=variant.budget)
    if variant.scores == "mean":
        options["scores"] = prefill.scores.mean(axis=0)
    elif variant.scores == "queries":
        tokens, count = prefill.kv.shape[2], prefill.queries.shape[1]
        options["queries"] = skv.recent_queries(prefill.queries, range(tokens - count, tokens),
                                                window_tokens=dict(enumerate(prefill.windows)))  # fmt: skip
    elif variant.scores:
        options["scores"] = prefill.scores
    return skv.policy(**options)


def key_spread(kv: Any) -> list[float]:
    """By layer: deviation over the tokens of the key channel that varies most, over that of the median channel; of the worst head."""
    deviation = kv[:, 0, 1:].astype(np.float32).std(axis=1)  # the first token's keys are like no others
    return [float(ratio) for ratio in (deviation.max(axis=2) / np.median(deviation, axis=2)).max(axis=1)]


def measure_segment(model: Model, mover: Mover, segment: Segment, variants: list[Variant], results: Results) -> None:
    prefill = model.prefill(segment.prefix)
    mover.load(prefill.kv)
    results.spread = results.spread or key_spread(prefill.kv)
    exact = model.continue_over(segment.tail, prefill.kv, len(segment.prefix))
    probability, best = np.exp(exact), exact.argmax(axis=1)
    targets = (np.arange(len(segment.tail) - 1), segment.tail[1:])
    results.perplexity.append(float(np.exp(-exact[targets].mean())))
    for variant in variants:
        landed = mover.move(policy_of(variant, prefill))
        lossy = model.continue_over(segment.tail, landed.kv, len(segment.prefix))
        change = float(np.exp(exact[targets].mean() - lossy[targets].mean()) - 1) * 100
        kl = float(np.einsum("ij,ij->", probability, exact - lossy, dtype=np.float64)) / len(segment.tail)
        row = {"wire": landed.wire, "kl": kl, "change": change, "top1": float((lossy.argmax(axis=1) == best).mean())}
        results.rows.setdefault(variant.key, []).append(row)


def answers(model: Model, needle: Needle, past: Any) -> bool:
    """Whether greedy decoding over `past` gives the answer: each of its tokens is the most likely one."""
    ids = np.concatenate([needle.question, needle.answer])
    said = model.continue_over(ids, past, len(needle.prefix), last=len(needle.answer) + 1).argmax(axis=1)
    return bool((said[:-1] == needle.answer).all())


def measure_needle(model: Model, mover: Mover, needle: Needle, variants: list[Variant], results: Results) -> None:
    prefill = model.prefill(needle.prefix)
    mover.load(prefill.kv)
    results.needles.setdefault("exact", []).append(answers(model, needle, prefill.kv))
    for variant in variants:
        landed = mover.move(policy_of(variant, prefill))
        results.needles.setdefault(variant.key, []).append(answers(model, needle, landed.kv))


class Log:
    """One line for each step, with the time it took."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._begin = quiet, time.monotonic()

    def __call__(self, what: str) -> None:
        if not self._quiet:
            print(f"{time.monotonic() - self._begin:7.0f} s  {what}", flush=True)
