"""Any layout to any other: RAW bit for bit, lossy tiers exactly as the format says."""

import numpy as np
import pytest
from layout_cases import LAYOUTS
from moves import (
    check, expected_of, fill, make_side, move, poison, random_words, scattered, small_group, tier_ids, unique,
)  # fmt: skip
from real_daemon import refused

import spectrumkv as skv
from spectrumkv import wire

TIERS = ("RAW", "Q8", "P8", "Q4", "P4", "Q3", "Q2")
# Words that a careless copy or conversion changes: signed zeros, infinities, NaNs of several payloads, subnormals,
# the largest finite value.
SPECIAL = {
    "float16": (0x8000, 0x0000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE55, 0x0001, 0x83FF, 0x7BFF, 0xFBFF),
    "bfloat16": (0x8000, 0x0000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFD5, 0x0001, 0x807F, 0x7F7F, 0xFF7F),
    "float32": (0x80000000, 0, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 1, 0x807FFFFF, 0x7F7FFFFF),
}


def policy_of(kind, rng, tokens):
    if kind == "raw":
        return skv.policy(allocator="RAW", budget=1.1)
    if kind == "mixed":
        # Budgets below what RAW needs for all: GREEDY spreads the tokens over the tiers.
        return skv.policy(allocator="GREEDY", budget=0.75, tiers=TIERS, scores=rng.random(tokens), sinks=1)
    return skv.policy(allocator="UNIFORM", uniform_tier=kind, tiers=TIERS, budget=1.1, sinks=0)


def tiers_of(kind, source, side, tokens, policy):
    """Tiers before escapes of K and V, as Plan gives them."""
    if kind == "raw":
        raw = np.zeros(tokens, np.uint8)
        return raw, raw, None
    plan = source.plan(side.pool, tokens, side.blocks, policy)
    assert len(plan.token_tiers_k) == tokens
    return tier_ids(plan.token_tiers_k), tier_ids(plan.token_tiers_v), plan


def check_reports(sent, received, wire_bytes, words):
    for report in (sent, received):
        assert report.wire_bytes == wire_bytes
        assert report.kv_bytes == sum(kv.nbytes for kv in words)
        assert report.saved_bytes == max(0, report.kv_bytes - report.wire_bytes)


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_layout(case, source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(LAYOUTS.index(case))
    here_groups, there_groups = case.groups(0), case.groups(1)
    planes = 2 if here_groups[0].has_v else 1
    shape = (len(case.layers), planes, case.tokens, case.heads, case.head_dim)
    words = [random_words(rng, shape, case.dtypes[0])]
    here = make_side(source, prefill, here_groups, {0: scattered(rng, here_groups[0], case.tokens, skip=case.skip[0])},
                     memory=case.memory[0])  # fmt: skip
    there = make_side(target, decode, there_groups,
                      {0: scattered(rng, there_groups[0], case.tokens, case.extra_blocks, case.skip[1])}, memory=case.memory[1])  # fmt: skip
    with here.pool, there.pool:
        fill(here, words)
        poison(there)
        policy = policy_of(case.policy, rng, case.tokens)
        tiers_k, tiers_v, plan = tiers_of(case.policy, source, here, case.tokens, policy)
        expected, wire_bytes = expected_of(words, here_groups, there_groups, tiers_k, tiers_v)
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, case.tokens, policy=policy,
                              pull=case.pull)  # fmt: skip
        check(there, expected)
        check_reports(sent, received, wire_bytes, words)
        if plan is not None:
            assert plan.wire_bytes == wire_bytes
            assert wire_bytes <= 0.75 * sent.kv_bytes
            assert set(tiers_k.tolist()) != {wire.Tier.RAW}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", TIERS[1:])
def test_every_tier(kind, dtype, source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(7)
    group = small_group(head_dim=80, dtype=dtype, num_blocks=40)
    tokens = 131
    words = [random_words(rng, (2, 2, tokens, 2, 80), dtype)]
    here = make_side(source, prefill, [group], {0: scattered(rng, group, tokens)})
    there = make_side(target, decode, [group], {0: scattered(rng, group, tokens)})
    with here.pool, there.pool:
        fill(here, words)
        poison(there)
        policy = policy_of(kind, rng, tokens)
        tiers_k, tiers_v, plan = tiers_of(kind, source, here, tokens, policy)
        assert set(tiers_k.tolist()) == {wire.Tier[kind]} == set(tiers_v.tolist())
        expected, wire_bytes = expected_of(words, [group], [group], tiers_k, tiers_v)
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy)
        check(there, expected)
        check_reports(sent, received, wire_bytes, words)
        assert plan.wire_bytes == wire_bytes


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_several_groups_in_one_pool(pull, source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(11)
    tokens = 45
    common = [dict(layers=[0, 2, 4], heads=4, head_dim=64), dict(layers=[1, 3], heads=1, head_dim=72),
              dict(layers=[5], heads=2, head_dim=128, sliding_window_tokens=16)]  # fmt: skip
    here_groups = [skv.Group(**c, block_tokens=b, num_blocks=n, dtype=d) for c, b, n, d in
                   zip(common, (16, 8, 4), (7, 9, 16), ("float16", "bfloat16", "float16"), strict=True)]  # fmt: skip
    there_groups = [skv.Group(**c, block_tokens=b, num_blocks=n, dtype=d, layout="HND") for c, b, n, d in
                    zip(common, (8, 32, 16), (9, 5, 6), ("float16", "bfloat16", "float16"), strict=True)]  # fmt: skip
    words = [random_words(rng, (len(g.layers), 2, tokens, g.heads, g.head_dim), g.dtype) for g in here_groups]
    here = make_side(source, prefill, here_groups, {i: scattered(rng, g, tokens) for i, g in enumerate(here_groups)})
    there = make_side(target, decode, there_groups, {i: scattered(rng, g, tokens) for i, g in enumerate(there_groups)})
    with here.pool, there.pool:
        fill(here, words)
        poison(there)
        policy = policy_of("mixed", rng, tokens)
        tiers_k, tiers_v, _ = tiers_of("mixed", source, here, tokens, policy)
        expected, wire_bytes = expected_of(words, here_groups, there_groups, tiers_k, tiers_v)
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy, pull=pull)
        check(there, expected)
        check_reports(sent, received, wire_bytes, words)


@pytest.mark.parametrize("kind", ["raw", "mixed", "P8"])
@pytest.mark.parametrize("there_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_that_are_no_numbers(dtype, there_dtype, kind, source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(13)
    tokens = 20
    here_group, there_group = small_group(dtype=dtype), small_group(dtype=there_dtype, layout="HND")
    kv = random_words(rng, (2, 2, tokens, 2, 16), dtype)
    for place, word in enumerate(SPECIAL[dtype]):
        kv[place % 2, place % 2, place + 3, place % 2, place] = word
    here = make_side(source, prefill, [here_group], {0: scattered(rng, here_group, tokens)})
    there = make_side(target, decode, [there_group], {0: scattered(rng, there_group, tokens)})
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        policy = policy_of(kind, rng, tokens)
        if kind == "mixed":
            policy.budget = 0.9
        tiers_k, tiers_v, _ = tiers_of(kind, source, here, tokens, policy)
        expected, wire_bytes = expected_of([kv], [here_group], [there_group], tiers_k, tiers_v)
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy)
        check(there, expected)
        check_reports(sent, received, wire_bytes, [kv])
        nonfinite = int((~np.isfinite(wire.chunk.math.widen(kv, wire.DType[dtype.upper()]))).sum())
        assert sent.nonfinite_values == nonfinite > 0
        if there_dtype in (dtype, "float32"):
            assert received.rounded_words == 0
        elif kind == "raw":
            assert received.rounded_words > 0


@pytest.mark.parametrize("here_dtype, there_dtype", [("bfloat16", "float16"), ("float16", "bfloat16"), ("float32", "float16")])
def test_values_that_do_not_fit_are_counted_one_by_one(here_dtype, there_dtype, source, target, prefill, decode, transfer_id):
    """Too large, too small, too exact: each word that is another value afterwards, and no other. `exact` refuses them all."""
    rng = np.random.default_rng(19)
    tokens = 20
    here_group, there_group = small_group(dtype=here_dtype), small_group(dtype=there_dtype)
    kv = np.zeros((2, 2, tokens, 2, 16), wire.chunk.math.narrow(np.zeros(1, np.float32), wire.DType[here_dtype.upper()]).dtype)
    values = np.array([0, 1, -2, 0.5, 1e5, -1e30, 1e-30, 1.0009765625, 65504, 3.0], np.float32)
    kv[:] = wire.chunk.math.narrow(rng.choice(values, kv.shape), wire.DType[here_dtype.upper()])
    raw = np.zeros(tokens, np.uint8)
    (expected,), _ = expected_of([kv], [here_group], [there_group], raw, raw)
    before, after = (wire.chunk.math.widen(w, wire.DType[d.upper()]) for w, d in ((kv, here_dtype), (expected, there_dtype)))
    changed = int((before != after).sum())
    assert 0 < changed < kv.size
    here = make_side(source, prefill, [here_group], {0: scattered(rng, here_group, tokens)})
    there = make_side(target, decode, [there_group], {0: scattered(rng, there_group, tokens)})
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        with refused("FAILED_PRECONDITION", "SCHEMA_MISMATCH"):
            move(transfer_id + ".exact", source, target, prefill, decode, here, there, tokens, policy=policy_of("raw", rng, tokens),
                 exact_conversion=True)  # fmt: skip
        poison(there)
        _, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy_of("raw", rng, tokens))
        check(there, [expected])
        assert received.rounded_words == changed


def test_strides_with_gaps(source, target, prefill, decode, transfer_id):
    """Tensors padded on every axis, at an odd offset, two pools of one schema each in its own segment."""
    rng = np.random.default_rng(17)
    tokens, heads, dim, block_tokens, blocks, element = 11, 3, 24, 4, 6, 2
    head_stride = (dim + 8) * element
    token_stride = (heads + 1) * head_stride
    block_stride = (block_tokens + 2) * token_stride
    plane_stride = blocks * block_stride + 64
    group = skv.Group(layers=[4], heads=heads, head_dim=dim, block_tokens=block_tokens, num_blocks=blocks)
    kv = random_words(rng, (1, 2, tokens, heads, dim), "float16")
    sides = []
    for client, daemon, ids in ((source, prefill, [5, 1, 2]), (target, decode, [0, 4, 3])):
        segment = skv.SharedSegment(2 * plane_stride + 6, "/" + unique("gaps"))
        schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[group.to_proto(0, 0)])
        schema.segments.add().posix_shm.name = segment.name
        schema.segments[0].posix_shm.size_bytes = segment.size_bytes
        for plane, tensor in enumerate((schema.groups[0].layers[0].k, schema.groups[0].layers[0].v)):
            tensor.offset_bytes = 6 + plane * plane_stride
            tensor.block_stride_bytes, tensor.token_stride_bytes = block_stride, token_stride
            tensor.head_stride_bytes, tensor.dim_stride_bytes = head_stride, element
        view = np.lib.stride_tricks.as_strided(
            segment.memory[6:].view("<u2"), (2, blocks, block_tokens, heads, dim),
            (plane_stride, block_stride, token_stride, head_stride, element),
        )  # fmt: skip
        sides.append((skv.Pool(client, schema, [group], 0), segment, view, ids))
    (here, here_segment, here_view, here_ids), (there, there_segment, there_view, there_ids) = sides
    with here, there:
        for t in range(tokens):
            here_view[:, here_ids[t // block_tokens], t % block_tokens] = kv[0, :, t]
        there_segment.memory[:] = 0xA5
        target.expect(transfer_id, pool=there, token_count=tokens, blocks=there_ids)
        source.send(transfer_id, peer=decode.peer, pool=here, token_count=tokens, blocks=here_ids,
                    policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
        target.wait(transfer_id, timeout_s=30)
        pages = there_view[:, there_ids].reshape(2, -1, heads, dim)
        assert (pages[:, :tokens] == kv[0]).all() and not pages[:, tokens:].any()
        there_view[:, there_ids] = 0xA5A5
        assert (there_segment.memory == 0xA5).all(), "a gap between tensors was written"
    for segment in (here_segment, there_segment):
        segment.close()


# Three groups in one region of pages of 1536 bytes: the first has 512 of every page, the others share the rest of an
# even and of an odd page. (layer, block_tokens, num_blocks, offset, stride)
SLICES = ((0, 4, 8, 0, 1536), (1, 8, 4, 512, 3072), (2, 8, 4, 2048, 3072))


def slice_group(layer, block_tokens, num_blocks):
    return small_group(layers=[layer], block_tokens=block_tokens, num_blocks=num_blocks)


def sliced_pool(client, shifts=(0, 0, 0)):
    """(pool, segment, view of each group as [planes, blocks, tokens, heads, dim]). shifts: bytes added to offsets."""
    segment = skv.SharedSegment(8 * 1536, "/" + unique("slices"))
    groups = [slice_group(*geometry) for *geometry, _, _ in SLICES]
    schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[group.to_proto(0, 0) for group in groups])
    schema.segments.add().posix_shm.name = segment.name
    schema.segments[0].posix_shm.size_bytes = segment.size_bytes
    views = []
    for group, proto, (*_, offset, stride), shift in zip(groups, schema.groups, SLICES, shifts, strict=True):
        plane_bytes = group.block_tokens * 64
        for plane, tensor in enumerate((proto.layers[0].k, proto.layers[0].v)):
            tensor.offset_bytes, tensor.block_stride_bytes = offset + shift + plane * plane_bytes, stride
        views.append(np.lib.stride_tricks.as_strided(
            segment.memory[offset:].view("<u2"), (2, group.num_blocks, group.block_tokens, 2, 16),
            (plane_bytes, stride, 64, 32, 2),
        ))  # fmt: skip
    try:
        return skv.Pool(client, schema, groups, 0), segment, views
    except skv.SpectrumKVError:
        segment.close()
        raise


def test_groups_share_a_region_in_disjoint_parts(source, target, prefill, decode, transfer_id):
    """Out of one shared region into another, and no word of a neighbour is taken or touched."""
    tokens, ids = 21, {0: [7, 0, 3, 1, 6, 2], 1: [2, 0, 3], 2: [1, 3, 0]}
    kv = random_words(np.random.default_rng(61), (3, 2, tokens, 2, 16), "float16")
    here, here_segment, here_views = sliced_pool(source)
    there, there_segment, there_views = sliced_pool(target)
    with here, there:
        here_segment.memory[:] = 0x3C
        there_segment.memory[:] = 0xA5
        for group, view in enumerate(here_views):
            size = here.groups[group].block_tokens
            for t in range(tokens):
                view[:, ids[group][t // size], t % size] = kv[group, :, t]
        target.expect(transfer_id, pool=there, token_count=tokens, blocks=ids)
        source.send(transfer_id, peer=decode.peer, pool=here, token_count=tokens, blocks=ids,
                    policy=skv.policy(allocator="RAW", budget=1.2))  # fmt: skip
        target.wait(transfer_id, timeout_s=30)
        for group, view in enumerate(there_views):
            pages = view[:, ids[group]].reshape(2, -1, 2, 16)
            assert (pages[:, :tokens] == kv[group]).all() and not pages[:, tokens:].any(), group
            view[:, ids[group]] = 0xA5A5
        assert (there_segment.memory == 0xA5).all(), "a block of another group was written"
    for segment in (here_segment, there_segment):
        segment.close()


@pytest.mark.parametrize("shifts, field, other", [
    ((2, 0, 0), "groups[1].layers[0].k", "groups[0].layers[0].v"),
    ((0, -2, 0), "groups[1].layers[0].k", "groups[0].layers[0].v"),
    ((0, 2, 0), "groups[1].layers[0].v", "groups[0].layers[0].k"),
    ((0, 0, -512), "groups[2].layers[0].k", "groups[0].layers[0].k"),
    ((0, 1536, 0), "groups[2].layers[0].k", "groups[1].layers[0].k"),
])  # fmt: skip
def test_groups_that_overlap_in_a_region_are_refused(shifts, field, other, source):
    with refused("INVALID_ARGUMENT", "OVERLAP", field=field, other=other):
        sliced_pool(source, shifts)
