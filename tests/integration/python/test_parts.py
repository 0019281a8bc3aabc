"""Transfers of several pools: all arrive, or none."""

import asyncio
import contextlib

import numpy as np
import pytest
from ends import ended, until
from moves import POISON, check, fill, make_side, poison, random_words, scattered
from real_daemon import refused

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

RAW = dict(allocator="RAW", budget=1.2)
TOKENS, ROWS = 37, 24
STATES = {name: report_pb2.TransferState.Value("TRANSFER_STATE_" + name)
          for name in ("WAITING", "VERIFYING", "COMMITTED", "FAILED", "CANCELLED", "EXPIRED")}  # fmt: skip


class Part:
    """A pool on each side, of one or several groups."""

    def __init__(self, world, groups, target_groups=None, tokens=TOKENS, model="m"):
        source, target, prefill, decode = world
        rng = np.random.default_rng(7 + groups[0].layers[0])
        self.tokens = tokens
        self.words = [random_words(rng, (len(g.layers), 2 if g.has_v else 1, tokens, g.heads, g.head_dim), g.dtype) for g in groups]
        self.here = make_side(source, prefill, groups, {i: scattered(rng, g, tokens) for i, g in enumerate(groups)}, model=model)
        groups = target_groups or groups
        self.there = make_side(target, decode, groups, {i: scattered(rng, g, tokens) for i, g in enumerate(groups)}, model=model)
        fill(self.here, self.words)
        poison(self.there)

    def untouched(self):
        return bool((self.there.pool.segment.memory == POISON).all())


def kv_group(first, layout="NHD", **options):
    """Two of four heads."""
    return skv.Group(**{**dict(layers=[0, 2], heads=2, head_dim=32, block_tokens=4, num_blocks=14, heads_total=4,
                               head_first=first, layout=layout), **options})  # fmt: skip


def state_group(**options):
    return skv.Group(**{**dict(layers=[1, 3], heads=1, head_dim=64, block_tokens=ROWS, num_blocks=3, has_v=False, state=True,
                               dtype="bfloat16"), **options})  # fmt: skip


class Request:
    """One transfer of several parts: two tensor-parallel ranks, and the state of other layers."""

    def __init__(self, source, target, prefill, decode, name, parts=None):
        world = (source, target, prefill, decode)
        self.source, self.target, self.prefill, self.decode, self.name = *world, name
        self.parts = parts or [Part(world, [kv_group(0)], [kv_group(0, "HND", block_tokens=8)]), Part(world, [kv_group(2)]),
                               Part(world, [state_group()], tokens=ROWS)]  # fmt: skip

    def _of(self, index, side, **options):
        part = self.parts[index]
        return {**dict(pool=side.pool, token_count=part.tokens, blocks=side.blocks, part=(index, len(self.parts))), **options}

    def send(self, index, pull=False, **options):
        options = self._of(index, self.parts[index].here, **{"policy": skv.policy(**RAW), **options})
        return self.source.publish(self.name, **options) if pull else self.source.send(self.name, peer=self.decode.peer, **options)

    def expect(self, index, pull=False, **options):
        options = self._of(index, self.parts[index].there, **options)
        return self.target.fetch(self.name, peer=self.prefill.peer, **options) if pull else self.target.expect(self.name, **options)

    def ends(self):
        """(sender's, receiver's report)"""
        return ended(self.source, self.name), ended(self.target, self.name)

    def all_end(self, state, reason):
        for report in self.ends():
            assert (report.state, report.reason) == (STATES[state], reason), report
            for part in report.parts:
                assert (part.state, part.reason) == (STATES[state], reason), part
        return self.ends()

    def part_now(self, index):
        return next((p for p in self.target.get_transfer(self.name).parts if p.part.index == index), report_pb2.TransferReport())


@pytest.fixture
def request_(source, target, prefill, decode, transfer_id):
    made = Request(source, target, prefill, decode, transfer_id)
    with contextlib.ExitStack() as pools:
        for part in made.parts:
            pools.enter_context(part.here.pool)
            pools.enter_context(part.there.pool)
        yield made


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_several_pools_arrive_together(pull, order, request_):
    before = request_.decode.metrics().get('spectrumkv_transfers_total{role="receiver",outcome="committed"}', 0)
    for index in order:
        request_.send(index, pull)
    for index in reversed(order):
        request_.expect(index, pull)
    sent, received = request_.all_end("COMMITTED", "")
    for part in request_.parts:
        check(part.there, part.words)
    for report in (sent, received):
        assert [(p.part.index, p.part.count, p.tokens) for p in report.parts] == [(0, 3, TOKENS), (1, 3, TOKENS), (2, 3, ROWS)]
        assert report.kv_bytes == sum(p.kv_bytes for p in report.parts) == sum(w.nbytes for p in request_.parts for w in p.words)
        assert report.wire_bytes == sum(p.wire_bytes for p in report.parts) > report.kv_bytes
    assert received.layers_ready == 4
    after = request_.decode.metrics()['spectrumkv_transfers_total{role="receiver",outcome="committed"}']
    assert after - before == 1, "one transfer, not three"


def test_lossy_parts_have_budgets_of_their_own_and_state_is_raw(request_):
    policies = [skv.policy(budget=0.6, allocator="GREEDY"), skv.policy(allocator="UNIFORM", uniform_tier="P8", budget=1.2), skv.policy()]
    for index, policy in enumerate(policies):
        request_.expect(index)
        request_.send(index, policy=policy)
    sent, _ = request_.all_end("COMMITTED", "")
    assert sent.parts[0].wire_bytes <= 0.6 * sent.parts[0].kv_bytes
    check(request_.parts[2].there, request_.parts[2].words)


def test_nothing_is_committed_while_a_part_is_missing(request_):
    for index in range(3):
        request_.expect(index)
    for index in (0, 2):
        request_.send(index)
    until(lambda: all(request_.part_now(i).state == STATES["VERIFYING"] for i in (0, 2)))
    whole = request_.target.get_transfer(request_.name)
    assert whole.state == STATES["WAITING"] and whole.layers_ready == 0
    request_.send(1)
    request_.all_end("COMMITTED", "")


def test_a_part_that_never_comes(request_):
    for index in range(3):
        request_.expect(index, deadline_ms=800 if index == 1 else 0)
    for index in (0, 2):
        request_.send(index)
    request_.all_end("EXPIRED", "DEADLINE_EXCEEDED")
    assert request_.parts[1].untouched()
    with refused("FAILED_PRECONDITION", "TRANSFER_TERMINAL"):
        request_.send(1)
    for index in range(3):  # the blocks are free
        request_.target.expect(f"{request_.name}.{index}", **request_._of(index, request_.parts[index].there, part=(0, 1)))
        request_.target.cancel(f"{request_.name}.{index}")


def test_a_part_that_does_not_fit_ends_all_and_names_the_field(source, target, prefill, decode, transfer_id):
    world = (source, target, prefill, decode)
    parts = [Part(world, [kv_group(0)]), Part(world, [kv_group(2)], [kv_group(2, head_dim=64)])]
    request = Request(*world, transfer_id, parts)
    with contextlib.ExitStack() as pools:
        for part in parts:
            pools.enter_context(part.here.pool)
            pools.enter_context(part.there.pool)
        for index in range(2):
            request.expect(index)
        request.send(0)
        until(lambda: request.part_now(0).state == STATES["VERIFYING"])
        request.send(1)
        for report in request.all_end("FAILED", "SCHEMA_MISMATCH"):
            assert "groups[0].head_dim" in report.message and "part 1" in report.parts[0].message
        assert parts[1].untouched()


@pytest.mark.parametrize("by", ["source", "target"])
def test_a_cancel_ends_all_parts(by, request_):
    for index in range(3):
        request_.expect(index)
        request_.send(index, layerwise=index == 1)  # which is never written
    until(lambda: all(request_.part_now(i).state == STATES["VERIFYING"] for i in (0, 2)))
    report = getattr(request_, by).cancel(request_.name)
    assert report.state == STATES["CANCELLED"] and len(report.parts) == 3
    request_.all_end("CANCELLED", "CANCELLED")


@pytest.mark.parametrize("side", ["here", "there"])
def test_a_pool_that_is_lost_ends_all_parts(side, request_):
    for index in range(3):
        request_.expect(index)
        request_.send(index, layerwise=index == 1)
    until(lambda: all(request_.part_now(i).state == STATES["VERIFYING"] for i in (0, 2)))
    lost = getattr(request_.parts[1], side).pool
    with open(f"/dev/shm{lost.segment.name}", "r+b") as segment:
        segment.truncate(4096)
    if side == "here":  # it is noticed when it is read
        request_.source.advance(request_.name, layers=2, tokens=TOKENS, part_index=1)
    for report in request_.ends():
        assert report.state == STATES["FAILED"], report
        assert all(part.state == STATES["FAILED"] for part in report.parts)


def test_layers_of_a_part_are_written_one_by_one(request_):
    for index in range(3):
        request_.expect(index)
        request_.send(index, layerwise=True)
    with refused("NOT_FOUND", "UNKNOWN_PART"):
        request_.source.advance(request_.name, layers=1, tokens=TOKENS, part_index=3)
    for layers in (1, 2):
        for index, part in enumerate(request_.parts):
            request_.source.advance(request_.name, layers=layers, tokens=part.tokens, part_index=index)
        until(lambda layers=layers: request_.target.get_transfer(request_.name).layers_ready >= 2 * layers)
    request_.all_end("COMMITTED", "")
    for part in request_.parts:
        check(part.there, part.words)


def test_parts_that_do_not_fit_their_call(request_):
    request_.expect(0, token=b"0123456789abcdef")
    for change in (dict(part=(1, 4)), dict(part=(3, 3)), dict(part=(0, 65)), dict(part=(0, 0))):
        with refused("INVALID_ARGUMENT", "INVALID_PART"):
            request_.expect(1, token=b"0123456789abcdef", **change)
    with refused("INVALID_ARGUMENT", "INVALID_PART", field="transfer_token"):
        request_.expect(1)
    request_.expect(0, token=b"0123456789abcdef")  # a repeat
    with refused("ALREADY_EXISTS", "TRANSFER_EXISTS"):
        request_.expect(0, token=b"0123456789abcdef", deadline_ms=777)
    request_.target.cancel(request_.name)
    request_.target.release(request_.name)  # or the sender would hear of that end
    request_.send(0)
    with refused("INVALID_ARGUMENT", "INVALID_PART", field="peer"):
        request_.source.send(request_.name, peer="127.0.0.1:9", **request_._of(1, request_.parts[1].here))
    with refused("INVALID_ARGUMENT", "INVALID_POLICY"):
        request_.send(1, policy=skv.policy(allocator="PDTRIM", tiers=["RAW", "DROP"], budget=0.5))
    request_.source.cancel(request_.name)


def test_numbers_of_parts_that_differ_are_told_to_both(request_):
    request_.expect(0, part=(0, 2))
    request_.send(0, part=(0, 3))
    for report in request_.all_end("FAILED", "SCHEMA_MISMATCH"):
        assert "part_count: 3 and 2" in report.message


def test_the_asynchronous_client(request_):
    async def run():
        async with skv.aio.Client(request_.prefill.worker) as source, skv.aio.Client(request_.decode.worker) as target:
            for index, part in enumerate(request_.parts):
                common = dict(token_count=part.tokens, part=(index, 3))
                await target.expect(request_.name, pool=part.there.pool, blocks=part.there.blocks, **common)
                await source.send(request_.name, peer=request_.decode.peer, pool=part.here.pool, blocks=part.here.blocks,
                                  policy=skv.policy(**RAW), **common)  # fmt: skip
            return await target.wait(request_.name, timeout_s=30)

    assert len(asyncio.run(run()).parts) == 3
    for part in request_.parts:
        check(part.there, part.words)
