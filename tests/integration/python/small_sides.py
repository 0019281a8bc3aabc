"""Two small pools that fit each other, one filled, and what a transfer between them needs to say."""

from contextlib import contextmanager

import numpy as np
from moves import fill, make_side, random_words, small_group

RAW = {"allocator": "RAW", "budget": 1.1}
TOKENS = 10


def sent_words():
    return random_words(np.random.default_rng(3), (2, 2, TOKENS, 2, 16), "float16")


@contextmanager
def small_sides(source, target, prefill, decode):
    here = make_side(source, prefill, [small_group()], {0: [3, 1, 2]})
    there = make_side(target, decode, [small_group()], {0: [5, 0, 7]})
    fill(here, [sent_words()])
    with here.pool, there.pool:
        yield here, there
