"""Transfers between two daemons, checked word for word against the Python implementation of the chunk format."""

import os
from dataclasses import dataclass

import numpy as np

import spectrumkv as skv
from spectrumkv import wire

POISON = 0xA5
WORDS = {"float16": "<u2", "bfloat16": "<u2", "float32": "<u4"}


@dataclass
class Side:
    """One end: a pool of `memory` kind "shm", "file" or "owned", and the blocks of the request per group."""

    pool: object
    blocks: dict


def make_side(client, daemon, groups, blocks, *, memory="shm", model="m", **options):
    if memory == "owned":
        return Side(client.daemon_owned_pool(groups, model=model, **options), blocks)
    shared = {"shared_dir": str(daemon.shared_dir)} if memory == "file" else {}
    return Side(client.shared_memory_pool(groups, model=model, **shared, **options), blocks)


def words_of(array, dtype):
    return array.view(WORDS[dtype])


def random_words(rng, shape, dtype, scale=1.0):
    """Normal values with a few strong channels, as keys have them."""
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    values[..., :: max(1, shape[-1] // 3)] *= 6
    if dtype == "float16":
        return values.astype("<f2").view("<u2")
    if dtype == "bfloat16":
        return (values.view("<u4") >> 16).astype("<u2")
    return values.view("<u4")


def scattered(rng, group, tokens, extra=0, skip=0):
    """Distinct block ids in no order, enough for `tokens` behind `skip` that belong to somebody else."""
    needed = -(-(skip + tokens) // group.block_tokens) + extra
    return skv.BlockTable([int(block) for block in rng.permutation(group.num_blocks)[:needed]], skip)


def skip_of(blocks):
    return getattr(blocks, "skip_tokens", 0)


def paged(kv, group, count, skip=0):
    """[layers, planes, tokens, ...] as whole blocks [layers, planes, count, block_tokens, ...], POISON around."""
    layers, planes, tokens, heads, dim = kv.shape
    out = np.full((layers, planes, count * group.block_tokens, heads, dim), POISON, np.uint8).astype(kv.dtype)
    out[:, :, skip : skip + tokens] = kv
    return out.reshape(layers, planes, count, group.block_tokens, heads, dim)


def fill(side, words):
    """Writes the words of every group, [layers, planes, tokens, heads, dim], into the side's blocks."""
    for index, group in enumerate(side.pool.groups):
        blocks = side.blocks[index]
        pages = paged(words[index], group, len(blocks), skip_of(blocks))
        if hasattr(side.pool, "kv"):
            words_of(side.pool.kv(index), group.dtype)[:, :, blocks] = pages
        else:
            side.pool.put(pages.view(group.numpy_dtype), blocks, index)


def poison(side):
    """Every byte of the destination, so that a forgotten or a stray write shows."""
    if hasattr(side.pool, "segment"):
        side.pool.segment.memory[:] = POISON
        return
    for index, group in enumerate(side.pool.groups):
        blocks = list(range(group.num_blocks))
        layers, planes, _, *rest = group.shape
        data = np.full((layers, planes, len(blocks), *rest), POISON, np.uint8).astype(WORDS[group.dtype])
        data.view(np.uint8)[:] = POISON
        side.pool.put(data.view(group.numpy_dtype), blocks, index)


def landed(side, index):
    """All words of a group, [layers, planes, num_blocks, block_tokens, heads, dim]."""
    group = side.pool.groups[index]
    if hasattr(side.pool, "kv"):
        return np.ascontiguousarray(words_of(side.pool.kv(index), group.dtype))
    return words_of(side.pool.get(list(range(group.num_blocks)), index), group.dtype)


def check(side, expected):
    """The request's tokens are `expected`, the tail of its last page is zero, and nothing else was touched."""
    for index, group in enumerate(side.pool.groups):
        all_words, blocks = landed(side, index), side.blocks[index]
        tokens = expected[index].shape[2]
        skip = skip_of(blocks)
        used = -(-(skip + tokens) // group.block_tokens)
        pages = all_words[:, :, blocks[:used]]
        layers, planes, _, _, heads, dim = pages.shape
        flat = pages.reshape(layers, planes, -1, heads, dim)
        wrong = int((flat[:, :, skip : skip + tokens] != expected[index]).sum())
        assert wrong == 0, f"group {index}: {wrong} of {expected[index].size} words differ"
        assert (np.ascontiguousarray(flat[:, :, :skip]).view(np.uint8) == POISON).all(), f"group {index}: a skipped token was written"
        assert not flat[:, :, skip + tokens :].any(), f"group {index}: the tail of the last page is not zero"
        rest = [block for block in range(group.num_blocks) if block not in blocks[:used]]
        assert (all_words[:, :, rest].view(np.uint8) == POISON).all(), f"group {index}: a byte outside was written"


def tier_ids(tiers):
    return np.array([wire.Tier[skv.tier_name(tier)] for tier in tiers], np.uint8)


def expected_of(words, groups, target_groups, tiers_k, tiers_v):
    """Per group the words that must land, and the wire bytes of all groups."""
    out, wire_bytes = [], 0
    for kv, group, other in zip(words, groups, target_groups, strict=True):
        plane_v = tiers_v if group.has_v else None
        raw = np.zeros(kv.shape[2], np.uint8)
        plane_k = tiers_k if group.has_v else raw  # a latent tensor travels raw
        result = wire.expected_words(
            np.ascontiguousarray(kv), plane_k, plane_v, wire.DType[group.dtype.upper()],
            to=wire.DType[other.dtype.upper()],
        )  # fmt: skip
        out.append(result.words)
        wire_bytes += result.wire_bytes
    return out, wire_bytes


def move(transfer_id, source, target, prefill, decode, from_side, to_side, tokens, *, policy=None, pull=False, **expect):
    """Runs one transfer to its end; (sender's report, receiver's report). Clients `source`, `target`."""
    there = dict(pool=to_side.pool, token_count=tokens, blocks=to_side.blocks, **expect)
    here = dict(pool=from_side.pool, token_count=tokens, blocks=from_side.blocks, policy=policy)
    if pull:
        source.publish(transfer_id, **here)
        target.fetch(transfer_id, peer=prefill.peer, **there)
    else:
        target.expect(transfer_id, **there)
        source.send(transfer_id, peer=decode.peer, **here)
    received = target.wait(transfer_id, role="RECEIVER", timeout_s=60)
    return source.wait(transfer_id, role="SENDER", timeout_s=60), received


def small_group(**changes):
    return skv.Group(**{**dict(layers=[0, 1], heads=2, head_dim=16, block_tokens=4, num_blocks=12), **changes})


def serves_the_next(transfer_id, source, target, prefill, decode):
    """A small RAW transfer goes through: nothing was lost."""
    rng = np.random.default_rng(1)
    group = small_group()
    kv = random_words(rng, (2, 2, 10, 2, 16), "float16")
    here = make_side(source, prefill, [group], {0: [3, 1, 2]}, model="next")
    there = make_side(target, decode, [group], {0: [5, 0, 7]}, model="next")
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        move(transfer_id + ".next", source, target, prefill, decode, here, there, 10,
             policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
        check(there, [kv])


def unique(prefix):
    return f"{prefix}-{os.urandom(4).hex()}"
