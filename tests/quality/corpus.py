"""The pinned text: twenty passages of Wikipedia, one for each segment, and needle trials hidden in them."""

from __future__ import annotations

import json
import pathlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from model import Model

ARTICLES = pathlib.Path(__file__).resolve().parents[1] / "data/wikipedia_excerpts/articles.json"
Ids = NDArray[np.int64]

_NAMES = ("amber falcon", "silver heron", "crimson otter", "golden badger", "violet lynx", "copper raven", "jade marten",
          "ivory stork", "scarlet newt", "cobalt wren")  # fmt: skip
TRIALS = 20


@dataclass
class Segment:
    """A prefix that is prefilled and the tokens that are scored after it."""

    name: str
    prefix: Ids
    tail: Ids


@dataclass
class Needle:
    """A prompt with a passkey somewhere in it, the question, and the tokens of the only right answer."""

    name: str
    prefix: Ids
    question: Ids
    answer: Ids


def articles() -> list[dict[str, str]]:
    out: list[dict[str, str]] = json.loads(ARTICLES.read_text(encoding="utf-8"))
    return out


def segments(model: Model, count: int, prefix: int, scored: int, text: pathlib.Path | None) -> list[Segment]:
    """One for each article; of `text`, if given, one after the other."""
    need, start = prefix + scored - len(model.start), np.array(model.start, np.int64)
    if text is not None:
        ids = model.encode(text.read_text(encoding="utf-8"))
        parts = [(f"{text.name}[{i}]", ids[i * need : (i + 1) * need]) for i in range(count)]
    else:
        parts = [(article["title"], model.encode(article["text"])[:need]) for article in articles()[:count]]
    if len(parts) < count or any(len(ids) < need for _, ids in parts):
        raise SystemExit(f"quality: the text has no {count} segments of {prefix} + {scored} tokens")
    whole = [(name, np.concatenate([start, ids])) for name, ids in parts]
    return [Segment(name, ids[:prefix], ids[prefix:]) for name, ids in whole]


def needles(model: Model, count: int, prefix: int) -> list[Needle]:
    """Depths go from the front to the back; each trial has a text, a name and a number of its own."""
    out = []
    for trial in range(count):
        rng = random.Random(trial)
        name, number = _NAMES[trial % len(_NAMES)], str(rng.randrange(10000, 100000))
        needle = model.encode(f" Remember this: the passkey of the {name} is {number}. ")
        question = model.encode(f"\nThe question was about the passkey. The passkey of the {name} is")
        answer = model.encode(" " + number)
        filler = model.encode(articles()[trial]["text"])[: prefix - len(needle) - len(model.start)]
        at = int(len(filler) * (trial + 0.5) / count)
        ids = np.concatenate([np.array(model.start, np.int64), filler[:at], needle, filler[at:]])
        out.append(Needle(f"needle {trial} at {at}", ids, question, answer))
    return out
