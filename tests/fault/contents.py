"""What every program of this folder agrees on: the shape of the pools, and the words that sources hold."""

import functools
import zlib

import numpy as np

import spectrumkv as skv

LAYERS = 6
BLOCKS = 72
MODEL = "fault"
# How long sources of refined transfers are kept.
RETAIN_S = 2.0
POISON = 0xA5
# Sources there are: name to tokens. The last one of a block is not full, but for "whole".
TOKENS = {"short": 37, "whole": 64, "middle": 100, "long": 171}

_POLICIES = {
    "RAW": dict(allocator="RAW", budget=1.1),
    "P8": dict(allocator="UNIFORM", uniform_tier="P8", tiers=["RAW", "P8"], budget=0.6),
    "Q4": dict(allocator="UNIFORM", uniform_tier="Q4", tiers=["RAW", "Q4"], budget=0.6),
    "P4": dict(allocator="UNIFORM", uniform_tier="P4", tiers=["RAW", "P4"], budget=0.6),
    "b=0.3": dict(budget=0.3, importance="POSITION"),
    "mixed": dict(budget=0.5, importance="POSITION", tiers=["RAW", "P8", "P4"]),
}
# What transfers have (RAW first), whole and layer-wise. Which token gets which tier of a layer-wise source follows from the layers
# that were ready together, so its tiers are those that decode each token by itself.
WHOLE_POLICIES = ("RAW", "P8", "Q4", "b=0.3")
LAYERWISE_POLICIES = ("RAW", "P8", "Q4", "mixed")
# Each cell, K or V of a token in a layer, is right if it is as one of these brings it.
CELLS_OF = {"mixed": ("RAW", "P8", "P4")}


def policy(name, **more):
    return skv.policy(**_POLICIES[name], **more)


def group():
    return skv.Group(layers=range(LAYERS), heads=2, head_dim=64, block_tokens=16, num_blocks=BLOCKS)


def blocks_for(tokens):
    return -(-tokens // group().block_tokens)


@functools.lru_cache(maxsize=None)
def words(seed, name):
    """The source `name` of a run: uint16 [LAYERS, 2, tokens, heads, head_dim], float16 with a few strong channels."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal((LAYERS, 2, TOKENS[name], 2, 64), dtype=np.float32)
    values[..., ::21] *= 6
    return values.astype("<f2").view("<u2")


def put_layers(cache, source, blocks, layers):
    """Writes these layers of source words [LAYERS, 2, tokens, ...] into blocks of a cache [LAYERS, 2, blocks, ...]."""
    size = cache.shape[3]
    for place, block in enumerate(blocks):
        part = source[:, :, place * size : (place + 1) * size]
        cache[layers, :, block, : part.shape[2]] = part[layers]


def wrong_words(words, candidates):
    """How many of words [LAYERS, 2, tokens, ...] lie in cells that are as in none of the candidates."""
    axes = tuple(range(3, words.ndim))
    right = np.logical_or.reduce([(words == candidate).all(axis=axes) for candidate in candidates])
    nearest = np.minimum.reduce([(words != candidate).sum(axis=axes) for candidate in candidates])
    return int(nearest[~right].sum())


def tokens_of(cache, blocks, tokens):
    """(words of the tokens, words behind them) in blocks of a cache."""
    pages = cache[:, :, list(blocks)]
    flat = pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])
    return flat[:, :, :tokens], flat[:, :, tokens:]
