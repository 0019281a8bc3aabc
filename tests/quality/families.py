"""The models that are measured, by the names of --model; the first is what the page and its goals are about."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import variants
from gemma import Gemma, assemble_gguf
from model import Model, find_gguf
from variants import Variant

NAMES = ("smollm2-135m", "gemma3-270m")
_TITLES = ("SmolLM2-135M-Instruct", "Gemma-3-270M")


@dataclass
class Family:
    """title: in pools and results. scored: tokens after a prefix, of which the committed text has to have enough."""

    title: str
    load: Callable[[], Model]
    scored: int
    variants: list[Variant]

    def _also(self, chosen: list[Variant]) -> list[Variant]:
        keys = {variant.key for variant in self.variants}
        return [variant for variant in chosen if variant.key in keys]

    @property
    def quick_variants(self) -> list[Variant]:
        return self._also(variants.quick_variants())

    @property
    def needle_variants(self) -> list[Variant]:
        return self._also(variants.needle_variants())


def find(name: str, folder: pathlib.Path) -> Family:
    """`folder`: where a model is put together whose package has it in pieces."""
    if name == NAMES[0]:
        return Family(_TITLES[0], lambda: Model(find_gguf()), 256, variants.all_variants())
    return Family(_TITLES[1], lambda: Gemma(assemble_gguf(folder)), 128, variants.short_variants())


def has_goals(title: str) -> bool:
    return title == _TITLES[0]
