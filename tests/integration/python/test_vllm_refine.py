"""Refinement in the vLLM connector, without vLLM: applied between two steps, never to a block that may be another request's."""

import asyncio
import os
import pathlib
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ends import until
from engine_side import LAYERS, values
from real_daemon import running
from refining_side import COMMITTED, HERE, THERE, TOKENS, Pair, refining, wait_staged
from test_vllm import push, receiving

from spectrumkv.v1 import policy_pb2, report_pb2
from spectrumkv.vllm.refinable import check_refinable
from spectrumkv.vllm.refinements import Refinements
from spectrumkv.vllm.settings import Settings

STRIP_BYTES = TOKENS * 2 * 16 * 4  # K or V of a layer: one chunk of a refinement
RATE = 20_000  # bytes a second: 80 kB of KV take some seconds


@pytest.fixture
def p(prefill):
    with refining(prefill) as made:
        yield made


@pytest.fixture
def d(decode):
    with refining(decode) as made:
        yield made


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def kv(rng):
    return values(rng, TOKENS)


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_exact_between_two_steps(p, d, transfer_id, kv, pull):
    if pull:
        sender = p.add(transfer_id, TOKENS, do_remote_decode=True, transfer_id=transfer_id)
        p.step(new=[(sender, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
        _, told = p.scheduler.request_finished(sender, aborted=False)
        told = {key: told[key] for key in ("transfer_id", "transfer_token", "prefill_peer")}
        receiving(d, transfer_id, told, THERE, TOKENS)
        d.until(lambda: transfer_id in d.received)
    else:
        sender = Pair(p, d, transfer_id, kv).sender
    coarse = d.read(THERE, TOKENS).copy()
    assert not (coarse == kv).all()
    wait_staged(d, transfer_id)
    assert (d.read(THERE, TOKENS) == coarse).all(), "nothing lands but in a step"
    seen = []
    d.step(new=[(d.add("other", 8), [50, 51], 0, 8)], write=lambda _: seen.append((d.read(THERE, TOKENS) == kv).all()))
    assert seen == [True] * LAYERS, "it is there before the step computes"
    d.until(lambda: d.counts["refinements_complete"] == 1)
    assert d.counts["refined_bytes"] == d.report(f"{transfer_id}.refine-1").applied_bytes > 0
    assert d.report(transfer_id).exact and not d.counts["refinements_failed"]
    assert d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=False) == (True, None)
    d.until(lambda: transfer_id in d.sent)
    assert d.report(transfer_id) is None, "released"
    if not pull:
        p.scheduler.request_finished(sender, aborted=False)
    start = time.monotonic()
    p.until(lambda: transfer_id in p.sent)
    assert time.monotonic() - start < 30, "its source is given up when all has crossed"


def test_the_last_token_is_the_engines(p, d, transfer_id, kv):
    """vLLM computes the prompt's last token itself: where that had come as RAW, the destination is not the source."""
    pair = Pair(p, d, transfer_id, kv)
    first = THERE[0]
    d.kv[:, :, first, 0] = 5.0  # a sink, which has come as RAW
    d.until(lambda: d.counts["refinements_complete"] == 1)
    assert (d.kv[:, :, first, 0] == 5.0).all() and (pair.words()[:, :, 1:] == kv[:, :, 1:]).all()
    assert not d.counts["refinements_failed"]
    assert d.counts["refined_bytes"] == d.report(f"{transfer_id}.refine-1").applied_bytes > 0
    pair.end()


def test_a_step_writes_so_much_and_no_more(prefill, decode, transfer_id, rng):
    """Two requests, one limit."""
    with refining(prefill, retain_share=1.0) as p, refining(decode, refine_step_bytes=2 * STRIP_BYTES + 100) as d:
        pairs, applied = [], []
        plain_step = d.step

        def step(**options):
            before = d.counts["refined_bytes"]
            done = plain_step(**options)
            applied.append(d.counts["refined_bytes"] - before)
            return done

        d.step = step
        for first in (0, 16):
            blocks = range(first, first + 16)
            pairs.append(Pair(p, d, f"{transfer_id}-{first}", values(rng, TOKENS), blocks, blocks))
        d.until(lambda: d.counts["refinements_complete"] == 2)
        print(f"{sum(map(bool, applied))} steps that apply, {max(applied)} bytes at most")
        assert max(applied) <= 2 * STRIP_BYTES and sum(map(bool, applied)) >= 10
        assert all(pair.exact() for pair in pairs)
        for pair in pairs:
            pair.end()


def test_steps_go_on_while_more_arrives(transfer_id, kv):
    """What is there is applied; no step waits for what is not."""
    with running(refine__max_rate_bytes=RATE) as slow, refining(slow) as p, running() as decode, refining(decode) as d:
        pair = Pair(p, d, transfer_id, kv)
        partly, slowest = 0, 0.0
        while not pair.exact():
            start = time.monotonic()
            d.step(new=[(d.add(f"other-{start}", 8), [50, 51], 0, 8)])
            slowest = max(slowest, time.monotonic() - start)
            partly += 0 < d.counts["refined_bytes"] and not pair.exact()
        print(f"{partly} steps with a part of it, the slowest took {slowest * 1e3:.0f} ms")
        assert partly > 10
        d.until(lambda: d.counts["refinements_complete"] == 1)
        pair.end()


def given_to_another(d, pair, **step):
    """A step in which another request computes into the blocks, and what the daemon knew of the transfer meanwhile."""
    known = []

    def write(layer):
        known.append(d.report(pair.name))
        d.kv[layer, :, pair.there] = 5.0

    d.step(new=[(d.add("other", TOKENS), pair.there, 0, TOKENS)], write=write, **step)
    return known


def nothing_lands(d, pair):
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        d.step()
    return (d.kv[:, :, pair.there] == 5.0).all()


def test_preempted_before_anything_is_applied(p, d, transfer_id, kv):
    """Its blocks are another request's in the very step that tells of it."""
    pair = Pair(p, d, transfer_id, kv)
    wait_staged(d, transfer_id)
    assert given_to_another(d, pair, preempted=[transfer_id]) == [None] * LAYERS, "released before the step computes"
    assert nothing_lands(d, pair) and d.counts["refined_bytes"] == 0 and d.counts["refinements_ended"] == 1
    assert d.scheduler.request_finished(pair.request, aborted=False) == (False, None)
    pair.end()


def test_preempted_while_more_arrives(transfer_id, kv):
    with running(refine__max_rate_bytes=RATE) as slow, refining(slow) as p, running() as decode, refining(decode) as d:
        pair = Pair(p, d, transfer_id, kv)
        d.until(lambda: d.counts["refined_bytes"] > 0)
        wait_staged(d, transfer_id, committed=False)
        assert given_to_another(d, pair, preempted=[transfer_id]) == [None] * LAYERS
        assert nothing_lands(d, pair)
        # The sender hears of it: what is not wanted any more is not kept.
        kept, _ = p.scheduler.request_finished(pair.sender, aborted=False)
        start = time.monotonic()
        p.until(lambda: transfer_id in p.sent)
        assert kept and time.monotonic() - start < 20


@pytest.mark.parametrize("aborted", [False, True], ids=["finished", "aborted"])
def test_ended_before_all_was_applied(p, d, transfer_id, kv, aborted):
    """vLLM keeps the blocks until the daemon has let go of them; nothing is applied any more."""
    pair = Pair(p, d, transfer_id, kv)
    wait_staged(d, transfer_id)
    coarse = pair.words().copy()
    assert d.scheduler.request_finished(pair.request, aborted=aborted) == (True, None)
    d.until(lambda: transfer_id in d.sent)
    assert (pair.words() == coarse).all() and d.report(transfer_id) is None
    given_to_another(d, pair)
    assert nothing_lands(d, pair) and d.counts["refined_bytes"] == 0
    pair.end()


def test_aborted_while_it_loads(p, d, transfer_id, kv):
    receiving(d, transfer_id, push(transfer_id, d.daemon), THERE, TOKENS)
    sender = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, d.daemon))
    p.step(new=[(sender, HERE, 0, TOKENS)], write=p.writer(kv, HERE), layers=2)
    d.scheduler.request_finished(d.scheduler._wanted[transfer_id].request, aborted=True)
    d.until(lambda: transfer_id in d.received)
    d.kv[:, :, THERE] = 5.0
    p.finish_step()
    p.scheduler.request_finished(sender, aborted=False)
    p.until(lambda: transfer_id in p.sent)
    d.step()
    assert (d.kv[:, :, THERE] == 5.0).all() and not d.courier.refinements.ready


def test_aborted_when_the_load_had_just_come(p, d, transfer_id, kv):
    """The scheduler does not know yet; vLLM frees the blocks as soon as it does."""
    request = receiving(d, transfer_id, push(transfer_id, d.daemon), THERE, TOKENS)
    sender = p.add(transfer_id, TOKENS, do_remote_decode=True, **push(transfer_id, d.daemon))
    p.step(new=[(sender, HERE, 0, TOKENS)], write=p.writer(kv, HERE))
    wait_staged(d, transfer_id)
    coarse = d.read(THERE, TOKENS).copy()
    assert d.scheduler.request_finished(request, aborted=True) == (False, None)
    assert d.step().cancels == [transfer_id]
    assert transfer_id in d.received and (d.read(THERE, TOKENS) == coarse).all()
    pair = SimpleNamespace(name=transfer_id, there=THERE)
    assert given_to_another(d, pair) == [None] * LAYERS and nothing_lands(d, pair)
    p.scheduler.request_finished(sender, aborted=True)
    p.until(lambda: transfer_id in p.sent)


def test_prefill_daemon_dies_in_between(transfer_id, kv):
    """The base stays, with what was applied; the request goes on and ends as any other."""
    with running(refine__max_rate_bytes=RATE) as dying, refining(dying) as p, running() as decode, refining(decode) as d:
        pair = Pair(p, d, transfer_id, kv)
        d.until(lambda: d.counts["refined_bytes"] > 0)
        coarse_or_exact = pair.words().copy()
        dying.kill()
        d.until(lambda: d.counts["refinements_failed"] == 1)
        now = pair.words()
        assert ((now == coarse_or_exact) | (now == kv)).all() and np.isfinite(now).all() and not (now == kv).all()
        assert d.report(transfer_id).state == COMMITTED
        d.step(more=[(pair.request, [], TOKENS, 1)])
        assert (pair.words() == now).all() and not d.failed
        pair.end()


def stand_still(process):
    """Returns when each of its threads has stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{process.pid}/task")
    until(lambda: all(task.joinpath("stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks.iterdir()))


def test_decode_daemon_stands_still(p, transfer_id, kv):
    """A step waits for it once, for a second; whoever takes the blocks away waits until it has answered."""
    with running() as stopped, refining(stopped) as d:
        pair = Pair(p, d, transfer_id, kv)
        wait_staged(d, transfer_id)
        stand_still(stopped.process)
        took = []
        for _ in range(3):
            start = time.monotonic()
            d.step()
            took.append(time.monotonic() - start)
        print("steps beside a daemon that stands still: " + ", ".join(f"{seconds:.2f} s" for seconds in took))
        assert max(took[1:]) < 0.5 and d.counts["refinements_late"] == 1
        taking = threading.Thread(target=given_to_another, args=(d, pair), kwargs={"preempted": [transfer_id]})
        resume = threading.Timer(1.5, lambda: os.kill(stopped.process.pid, signal.SIGCONT))
        resume.start()
        start = time.monotonic()
        taking.start()
        taking.join()
        assert time.monotonic() - start > 1.4, "its blocks are not written before what was asked for has been answered"
        assert nothing_lands(d, pair)
        pair.end()


class FakeDaemon:
    """Has one coarse transfer and a refinement that is staged; it is slow to write."""

    def __init__(self):
        self.told, self.answered = [], asyncio.Event()

    async def get_transfer(self, name, role):
        tiers = [report_pb2.TierCount(tier=policy_pb2.TIER_Q4, k_tokens=1)]
        return report_pb2.TransferReport(transfer_id=name, retained_seconds=9, tiers=tiers)

    async def wait(self, name, role, on_progress):
        self.told.append("arrived")

    async def apply_refinement(self, name, max_bytes):
        self.told.append("apply")
        await self.answered.wait()
        self.told.append("applied")
        return SimpleNamespace(applied_bytes=8, staged_bytes=0, complete=True)

    async def release(self, name, role):
        self.told.append("release")


def test_what_writes_is_answered_before_the_release():
    """The daemon does not say that a release waits for it."""

    async def run():
        daemon, counts = FakeDaemon(), {}
        refinements = Refinements(daemon, daemon, "RAW", counts.__setitem__)
        refinements.begin("request", "t")
        while not refinements.ready:
            await asyncio.sleep(0)
        applying = asyncio.create_task(refinements.apply(1 << 20, time.monotonic() + 9))
        while "apply" not in daemon.told:
            await asyncio.sleep(0)
        ending = asyncio.create_task(refinements.end("request"))
        await asyncio.sleep(0.05)
        assert not ending.done()
        daemon.answered.set()
        await asyncio.gather(applying, ending)
        return daemon.told, counts

    told, counts = asyncio.run(run())
    assert told == ["arrived", "apply", "applied", "release"] and counts == {"refinements_ended": 1, "refined_bytes": 8}


def test_retained_blocks_are_bounded(p, d, transfer_id, rng):
    """A quarter of 64 blocks: one request of sixteen is kept, the next is sent as if it could not be refined."""
    first = Pair(p, d, f"{transfer_id}-1", values(rng, TOKENS))
    second = Pair(p, d, f"{transfer_id}-2", values(rng, TOKENS), range(16, 32), range(40, 56))
    assert p.counts["retentions_refused"] == 1
    with p.daemon.client() as client:
        assert client.get_transfer(second.name).retained_seconds == 0
    d.until(first.exact)
    assert not second.exact()
    first.end()
    third = Pair(p, d, f"{transfer_id}-3", values(rng, TOKENS))
    d.until(third.exact)
    for pair in (second, third):
        pair.end()


def test_preempted_while_its_source_is_kept(transfer_id, kv):
    """When the step that takes its blocks goes on, nobody reads them."""
    with running(refine__max_rate_bytes=RATE) as slow, refining(slow) as p, running() as decode, refining(decode) as d:
        pair = Pair(p, d, transfer_id, kv)
        d.until(lambda: d.counts["refined_bytes"] > 0)
        p.step(preempted=[transfer_id])
        p.kv[:] = 77.0
        d.until(lambda: d.counts["refinements_failed"] == 1)
        assert not (pair.words() == 77.0).any()
        pair.end()


def test_time_is_over(transfer_id, kv):
    """A source that could not be sent in time: its blocks come back, and the destination keeps what it has got."""
    with running(refine__max_rate_bytes=RATE) as slow, running() as decode:
        with refining(slow, retain_seconds=1.5) as p, refining(decode) as d:
            pair = Pair(p, d, transfer_id, kv)
            p.scheduler.request_finished(pair.sender, aborted=False)
            start = time.monotonic()
            p.until(lambda: transfer_id in p.sent)
            assert time.monotonic() - start < 10
            p.kv[:] = 77.0
            d.until(lambda: d.counts["refinements_failed"] == 1)
            assert not (pair.words() == 77.0).any() and not pair.exact()
            pair.end()


def test_a_request_that_asks_for_less(p, d, transfer_id, kv):
    pair = Pair(p, d, transfer_id, kv, refine="Q8")
    error = np.abs(pair.words() - kv).max()
    p.scheduler.request_finished(pair.sender, aborted=False)
    p.until(lambda: transfer_id in p.sent)  # long before its time is over
    d.until(lambda: d.counts["refinements_complete"] == 1)
    assert 0 < np.abs(pair.words() - kv).max() < error / 4
    pair.end()


def test_kept_by_the_daemon(transfer_id, kv):
    """The blocks are the engine's again when the transfer has committed, and the refinement is exact all the same."""
    with running(refine__max_rate_bytes=RATE, refine__cache_bytes=1 << 20) as slow, running() as decode:
        with refining(slow, retain_in="daemon") as p, refining(decode) as d:
            pair = Pair(p, d, transfer_id, kv)
            p.scheduler.request_finished(pair.sender, aborted=False)
            p.until(lambda: transfer_id in p.sent)
            assert d.counts["refinements_complete"] == 0
            p.kv[:] = 77.0
            d.until(lambda: d.counts["refinements_complete"] == 1)
            assert pair.exact() and not d.counts["refinements_failed"] and not p.counts.get("retentions_refused")
            pair.end()


def test_not_kept_by_a_daemon_without_room(d, prefill, transfer_id, kv):
    """Its blocks come back at once, too; the request decodes with what it has."""
    with refining(prefill, retain_in="daemon") as p:
        pair = Pair(p, d, transfer_id, kv)
        p.scheduler.request_finished(pair.sender, aborted=False)
        p.until(lambda: transfer_id in p.sent)
        p.kv[:] = 77.0
        until(lambda: p.step() and p.counts.get("retentions_refused") == 1)
        assert np.isfinite(pair.words()).all() and not (pair.words() == 77.0).any()
        pair.end()


def test_a_receiver_that_refines_nothing(prefill, decode, transfer_id, kv):
    """Nothing was to be kept, so nothing was refused."""
    with refining(prefill, retain_in="daemon") as p, refining(decode, refine="") as d:
        pair = Pair(p, d, transfer_id, kv)
        p.scheduler.request_finished(pair.sender, aborted=False)
        p.until(lambda: transfer_id in p.sent)
        p.step()
        assert not p.counts.get("retentions_refused")
        assert d.scheduler.request_finished(pair.request, aborted=False) == (False, None)


@pytest.mark.parametrize("asked", [{"refine": ""}, {"allocator": "RAW", "budget": 1.1}], ids=["not wanted", "nothing to gain"])
def test_not_kept(p, d, transfer_id, kv, asked):
    pair = Pair(p, d, transfer_id, kv, **asked)
    p.scheduler.request_finished(pair.sender, aborted=False)
    p.until(lambda: transfer_id in p.sent)
    assert p.report(transfer_id).retained_seconds == 0 and not d.courier.refinements.ready
    until(lambda: not d.courier.refinements._coming)  # it has seen that there is nothing to wait for
    d.scheduler.request_finished(pair.request, aborted=False)
    d.until(lambda: transfer_id in d.sent)
    assert d.report(transfer_id).state == COMMITTED, "what was never kept is not forgotten"


def test_one_of_several_workers_has_failed(d, transfer_id):
    """vLLM computes the prompt, perhaps into other blocks: the other workers refine nothing."""
    receiving(d, transfer_id, push(transfer_id, d.daemon), THERE, TOKENS)
    d.scheduler.failed_blocks({THERE[3]})
    d.scheduler.finished_receiving([transfer_id])
    assert d.step(preempted=[transfer_id]).ended == [transfer_id]
    request = d.scheduler._wanted[transfer_id].request
    assert d.scheduler.request_finished(request, aborted=False) == (False, None)
    with d.daemon.client() as client:
        client.cancel(transfer_id)
    d.until(lambda: transfer_id in d.received)


@pytest.mark.parametrize("wrong", [
    {"refine": "Q9"}, {"refine": True}, {"retain_seconds": 0}, {"retain_in": "disk"}, {"retain_share": 1.5},
    {"refine_step_bytes": 0},
])  # fmt: skip
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"kv_connector_extra_config: {next(iter(wrong))} cannot be"):
        Settings.of({"daemon": "x", **wrong})


def test_engines_that_cannot_be_refined():
    class FullAttentionSpec:
        pass

    class SlidingWindowSpec:
        pass

    def config(spec):
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])

    check_refinable(SimpleNamespace(use_v2_model_runner=False), config(FullAttentionSpec()))
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        check_refinable(SimpleNamespace(use_v2_model_runner=False), config(SlidingWindowSpec()))
    with pytest.raises(ValueError, match="SlidingWindowSpec"):
        several = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()})
        check_refinable(SimpleNamespace(use_v2_model_runner=False), config(several))
    with pytest.raises(ValueError, match="V2 model runner"):
        check_refinable(SimpleNamespace(use_v2_model_runner=True), config(FullAttentionSpec()))
