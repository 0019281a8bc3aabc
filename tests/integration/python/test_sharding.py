"""Sides that do not hold the same: other tensor-parallel sizes, a prefix that is there already, state that is no KV."""

import contextlib

import numpy as np
import pytest
from moves import POISON, check, expected_of, fill, make_side, move, poison, random_words, scattered, tier_ids, words_of
from real_daemon import refused

import spectrumkv as skv

RAW = dict(allocator="RAW", budget=1.2)
TOKENS = 37
EVEN = skv.head_ranges
# (source ranks, target ranks): the heads of each.
SIZES = {
    "1 to 1": (EVEN(4, 1), EVEN(4, 1)),
    "2 to 1": (EVEN(8, 2), EVEN(8, 1)),
    "1 to 2": (EVEN(8, 1), EVEN(8, 2)),
    "4 to 2": (EVEN(8, 4), EVEN(8, 2)),
    "2 to 4": (EVEN(8, 2), EVEN(8, 4)),
    "2 to 3": (EVEN(6, 2), EVEN(6, 3)),
    "3 to 2": (EVEN(6, 3), EVEN(6, 2)),
    "2 to 3 of uneven shares": (EVEN(7, 2), EVEN(7, 3)),
    "more ranks than heads": (EVEN(2, 4), EVEN(2, 2)),
    "to more ranks than heads": (EVEN(2, 2), EVEN(2, 4)),
}


def by_hand(sources, targets):
    """Head by head: who gives it to whom. Slow and obvious."""
    return {(target, head): [s for s, held in enumerate(sources) if head in held]
            for target, wanted in enumerate(targets) for head in wanted}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_slices_give_every_target_each_head_once(name):
    sources, targets = SIZES[name]
    wanted = by_hand(sources, targets)
    given = [(s.target, head, s.source) for s in skv.head_slices(sources, targets) for head in range(s.first, s.first + s.count)]
    assert sorted((target, head) for target, head, _ in given) == sorted(wanted)
    assert all(source in wanted[target, head] for target, head, source in given)


def test_a_head_that_nobody_has():
    with pytest.raises(ValueError, match="no source has head 3"):
        skv.head_slices([range(3), range(4, 8)], EVEN(8, 1))
    assert EVEN(7, 3) == [range(3), range(3, 5), range(5, 7)] and EVEN(2, 4) == [range(1)] * 2 + [range(1, 2)] * 2
    with pytest.raises(ValueError):
        EVEN(4, 0)


def rank_group(held, heads_total, **layout):
    return skv.Group(layers=[0, 3], heads=len(held), head_dim=24, num_blocks=14, heads_total=heads_total,
                     head_first=held.start, **layout)  # fmt: skip


@pytest.mark.parametrize("policy", ["RAW", "P8"])
@pytest.mark.parametrize("name", SIZES)
def test_tensor_parallel_sizes_that_differ(name, policy, source, target, prefill, decode, transfer_id):
    """Every rank has its own pool, layout and block table; every head arrives where it belongs, and nothing else does."""
    sources, targets = SIZES[name]
    heads_total = max(held.stop for held in sources)
    rng = np.random.default_rng(list(SIZES).index(name))
    kv = random_words(rng, (2, 2, TOKENS, heads_total, 24), "float16")
    chosen = skv.policy(**RAW) if policy == "RAW" else skv.policy(allocator="UNIFORM", uniform_tier="P8", budget=1.2, sinks=0)
    with contextlib.ExitStack() as pools:
        here, there = [], []
        for held in sources:
            group = rank_group(held, heads_total, block_tokens=4)
            here.append(make_side(source, prefill, [group], {0: scattered(rng, group, TOKENS)}))
            pools.enter_context(here[-1].pool)
            fill(here[-1], [np.ascontiguousarray(kv[:, :, :, held.start : held.stop])])
        for held in targets:
            group = rank_group(held, heads_total, block_tokens=8, layout="HND", fused=True)
            there.append(make_side(target, decode, [group], {0: scattered(rng, group, TOKENS)}))
            pools.enter_context(there[-1].pool)
            poison(there[-1])
        want = [np.empty((2, 2, TOKENS, len(held), 24), kv.dtype) for held in targets]
        for number, part in enumerate(skv.head_slices(sources, targets)):
            a, b = here[part.source], there[part.target]
            cut = np.ascontiguousarray(kv[:, :, :, part.first : part.first + part.count])
            with a.pool.head_view(part.first, part.count) as from_view, b.pool.head_view(part.first, part.count) as to_view:
                a_view, b_view = type(a)(from_view, a.blocks), type(b)(to_view, b.blocks)
                if policy == "RAW":
                    tiers = [np.zeros(TOKENS, np.uint8)] * 2
                else:
                    plan = source.plan(from_view, TOKENS, a.blocks, chosen)
                    tiers = [tier_ids(plan.token_tiers_k), tier_ids(plan.token_tiers_v)]
                (expected,), _ = expected_of([cut], from_view.groups, to_view.groups, *tiers)
                first = part.first - targets[part.target].start
                want[part.target][:, :, :, first : first + part.count] = expected
                move(f"{transfer_id}.{number}", source, target, prefill, decode, a_view, b_view, TOKENS, policy=chosen,
                     pull=number % 2 == 1)  # fmt: skip
        for side, words in zip(there, want, strict=True):
            check(side, [words])


def test_a_view_of_heads_that_the_pool_does_not_hold(source, prefill):
    group = rank_group(range(2, 6), 8, block_tokens=4)
    side = make_side(source, prefill, [group], {0: [0]})
    with side.pool as pool:
        for first, count in ((1, 2), (5, 2), (2, 0), (6, 1)):
            with pytest.raises(ValueError, match="2 to 5"):
                pool.head_view(first, count)
        with pool.head_view(3, 2) as view:
            assert view.get([0]).shape == (2, 2, 1, 4, 2, 24)
            words = np.arange(2 * 2 * 4 * 2 * 24, dtype="<u2").reshape(2, 2, 1, 4, 2, 24)
            view.put(words.view("<f2"), [0])
            assert (words_of(pool.kv()[:, :, :1, :, 1:3], "float16") == words).all()
            assert not words_of(pool.kv()[:, :, :1, :, ::3], "float16").any()  # heads 2 and 5


def test_ranks_that_hold_other_heads_are_refused_without_a_view(source, target, prefill, decode, transfer_id):
    whole, half = rank_group(range(4), 4, block_tokens=4), rank_group(range(2), 4, block_tokens=4)
    other = rank_group(range(2, 4), 4, block_tokens=4)
    for number, (a, b, field) in enumerate(((whole, half, "head_count"), (half, other, "head_first"), (half, whole, "head_count"))):
        here, there = make_side(source, prefill, [a], {0: [1]}), make_side(target, decode, [b], {0: [2]})
        with here.pool, there.pool:
            poison(there)
            name = f"{transfer_id}.{number}"
            with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
                move(name, source, target, prefill, decode, here, there, 4, policy=skv.policy(**RAW))
            with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
                source.wait(name, timeout_s=20)
            for client in (source, target):  # both sides are told the field
                assert f"groups[0].{field}" in client.get_transfer(name).message
            assert (there.pool.segment.memory == POISON).all()


@pytest.mark.parametrize("prefix", [48, 47, 1, 84], ids=lambda n: f"of {n}")  # at a block's end, and inside blocks
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (16, 4), (8, 6)], ids=str)
@pytest.mark.parametrize("policy", ["RAW", "GREEDY"])
def test_only_the_rest_of_a_prompt_is_sent(prefix, sizes, policy, source, target, prefill, decode, transfer_id):
    """The receiver has the first tokens, better than a lossy transfer would leave them: not a bit of them changes."""
    tokens = 85
    rng = np.random.default_rng(71)
    here_group, there_group = (skv.Group(layers=[0, 1], heads=2, head_dim=32, block_tokens=size, num_blocks=-(-tokens // size) + 3,
                                         layout=layout) for size, layout in zip(sizes, ("NHD", "HND"), strict=True))  # fmt: skip
    kv = random_words(rng, (2, 2, tokens, 2, 32), "float16")
    here = make_side(source, prefill, [here_group], {0: scattered(rng, here_group, tokens)})
    there = make_side(target, decode, [there_group], {0: scattered(rng, there_group, tokens)})
    budget = 0.4 if prefix < 84 else 1.0
    chosen = skv.policy(allocator="RAW", budget=1.4)
    if policy == "GREEDY":
        chosen = skv.policy(allocator="GREEDY", budget=budget, sinks=0, importance="POSITION")
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        held = random_words(rng, (2, 2, prefix, 2, 32), "float16")
        there.pool.write_tokens(held.view("<f2"), there.blocks[0][: -(-prefix // there_group.block_tokens)])
        a = type(here)(here.pool, {0: here_group.blocks_after(here.blocks[0], prefix)})
        b = type(there)(there.pool, {0: there_group.blocks_after(there.blocks[0], prefix)})
        sent, received = move(transfer_id, source, target, prefill, decode, a, b, tokens - prefix, policy=chosen)
        assert sent.kv_bytes == kv[:, :, prefix:].nbytes and received.tokens == tokens - prefix
        got = words_of(there.pool.read_tokens(tokens, there.blocks[0]), "float16")
        assert (got[:, :, :prefix] == held).all()
        if policy == "RAW":
            assert (got[:, :, prefix:] == kv[:, :, prefix:]).all()
        elif prefix < 84:  # one token alone costs more than the budget
            assert sent.wire_bytes <= 0.4 * sent.kv_bytes
            exact = kv[:, :, prefix:].view("<f2").astype(np.float32)
            assert np.abs(got[:, :, prefix:].view("<f2").astype(np.float32) - exact).max() < np.abs(exact).max()


def test_the_blocks_behind_a_prefix():
    group = skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=8, num_blocks=9)
    for tokens, rest, skip in ((0, [4, 2, 7], 0), (7, [4, 2, 7], 7), (8, [2, 7], 0), (9, [2, 7], 1), (24, [], 0)):
        table = group.blocks_after([4, 2, 7], tokens)
        assert (table, table.skip_tokens) == (rest, skip)
    for tokens in (25, -1):
        with pytest.raises(ValueError, match="do not lie in"):
            group.blocks_after([4, 2, 7], tokens)


def test_tokens_that_cannot_be_skipped(source, prefill):
    group = skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=8, num_blocks=9)
    side = make_side(source, prefill, [group], {0: [0]})
    with side.pool as pool:
        for skip, tokens, blocks in ((8, 1, [0, 1]), (2**32 - 1, 1, [0, 1]), (7, 2, [0]), (7, 10, [0, 1])):
            with refused("INVALID_ARGUMENT", "INVALID_BLOCKS"):
                source.plan(pool, tokens, skv.BlockTable(blocks, skip))
        assert source.plan(pool, 9, skv.BlockTable([0, 1], 7)).kv_bytes == 9 * 2 * 8 * 2


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_state_that_is_no_kv_travels_as_it_is(pull, source, target, prefill, decode, transfer_id):
    """State-space state beside a cache: a group without V whose blocks are a request's whole state, in a transfer of its
    own. Any bytes at all, whatever numbers they would be."""
    rows, width = 48, 256  # 24 KiB a layer: [rows, width] of 2-byte words
    state = skv.Group(layers=[1, 2, 4], heads=1, head_dim=width, block_tokens=rows, num_blocks=5, has_v=False, state=True,
                      dtype="bfloat16")  # fmt: skip
    words = np.random.default_rng(83).integers(0, 1 << 16, (3, 1, rows, 1, width)).astype("<u2")
    here = make_side(source, prefill, [state], {0: [3]})
    there = make_side(target, decode, [state], {0: [1]})
    with here.pool, there.pool:
        fill(here, [words])
        poison(there)
        # The default policy is lossy; what has no V is raw all the same.
        sent, _ = move(transfer_id, source, target, prefill, decode, here, there, rows, policy=skv.policy(), pull=pull)
        check(there, [words])
        assert sent.wire_bytes >= words.nbytes


def test_state_is_not_converted(source, target, prefill, decode, transfer_id):
    """Its words are no numbers that another data type could hold."""
    groups = [skv.Group(layers=[1], heads=1, head_dim=64, block_tokens=8, num_blocks=4, has_v=False, state=True, dtype=dtype)
              for dtype in ("bfloat16", "float32")]  # fmt: skip
    here, there = make_side(source, prefill, groups[:1], {0: [1]}), make_side(target, decode, groups[1:], {0: [2]})
    with here.pool, there.pool, refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
        move(transfer_id, source, target, prefill, decode, here, there, 8, policy=skv.policy(**RAW))


def test_state_beside_tokens_in_one_pool(source):
    groups = [skv.Group(layers=[layer], heads=1, head_dim=64, block_tokens=8, num_blocks=4, has_v=False, state=state)
              for layer, state in ((0, False), (1, True))]  # fmt: skip
    with refused("INVALID_ARGUMENT", "INVALID_SCHEMA"):
        source.shared_memory_pool(groups, model="m")
