"""Refinement through two real daemons: what arrived coarse becomes the source, word for word."""

import contextlib
import time

import numpy as np
import pytest
from ends import CANCELLED, COMMITTED, Ends, ended, until
from moves import landed, random_words
from real_daemon import RealDaemon, refused, running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.v1 import report_pb2

FAILED = report_pb2.TRANSFER_STATE_FAILED
TOKENS = 90
COARSE = dict(allocator="UNIFORM", uniform_tier="Q4", budget=0.6, retain_seconds=60)
GROUP = dict(layers=[0, 1, 3], heads=2, head_dim=64, block_tokens=8, num_blocks=40)


def words(ends):
    """What the destination has of the request, [layers, planes, tokens, heads, dim]."""
    pages = landed(ends.there, 0)[:, :, list(ends.there.blocks[0])]
    return pages.reshape(*pages.shape[:2], -1, *pages.shape[4:])[:, :, :TOKENS]


@pytest.fixture
def ends(source, target, prefill, decode, transfer_id):
    made = Ends(source, target, prefill, decode, transfer_id, skv.Group(**GROUP), TOKENS)
    with made.here.pool, made.there.pool:
        yield made


def commit(ends, pull=False, **policy):
    if pull:
        ends.publish(policy=skv.policy(**{**COARSE, **policy}))
        ends.fetch(refinable=True)
    else:
        ends.expect(refinable=True)
        ends.send(policy=skv.policy(**{**COARSE, **policy}))
    ends.both_end(COMMITTED)
    assert not (words(ends) == ends.kv).all()


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_exact_after_refinement(pull, direct, ends):
    """The address of a pushed source is what the daemon saw of it; nobody names it."""
    commit(ends, pull)
    coarse = words(ends).copy()
    refine_id = ends.name + ".r"
    answer = ends.target.refine(ends.name, refine_id, direct=direct)
    assert answer.cells_left == 0 and answer.kv_bytes <= ends.kv.nbytes
    report = ends.target.wait(refine_id, timeout_s=30)
    assert report.refines == ends.name and report.saved_bytes == 0
    if not direct:
        assert (words(ends) == coarse).all(), "nothing lands before it is applied"
        assert ends.target.get_transfer(refine_id).staged_bytes == answer.kv_bytes
        half = ends.target.apply_refinement(refine_id, max_bytes=answer.kv_bytes // 2)
        assert not half.complete and 0 < half.applied_bytes <= answer.kv_bytes // 2
        rest = ends.target.apply_refinement(refine_id)
        assert rest.complete and rest.exact and half.applied_bytes + rest.applied_bytes == answer.kv_bytes
    assert (words(ends) == ends.kv).all()
    assert ends.target.get_transfer(ends.name).exact
    assert ends.target.refine(ends.name, ends.name + ".again").cells == 0
    for client in (ends.source, ends.target):
        until(lambda client=client: client.get_transfer(ends.name).refined_wire_bytes == report.wire_bytes)
        base = client.get_transfer(ends.name)
        assert base.state == COMMITTED
        assert base.saved_bytes == max(0, base.kv_bytes - base.wire_bytes - report.wire_bytes)
        assert (base.retained_seconds > 0) == (client is ends.target), "nothing is left for which the source would be needed"
        client.release(ends.name)


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_exact_on_its_own(pull, ends):
    policy = skv.policy(**COARSE, refine="RAW")
    if pull:
        ends.publish(policy=policy)
        ends.fetch(refinable=True, refine_direct=True)
    else:
        ends.expect(refinable=True, refine_direct=True)
        ends.send(policy=policy)
    report = ends.target.wait_exact(ends.name, timeout_s=30)
    assert report.exact and report.transfer_id == ends.name and report.state == COMMITTED
    assert (words(ends) == ends.kv).all()
    assert not ends.source.wait_exact(ends.name, timeout_s=30).exact, "a sender hears that its blocks are free"
    assert ends.target.wait_exact(ends.name, timeout_s=30).exact, "at once, also later"
    assert ends.target.get_transfer(ends.name + ".refine-1").state == COMMITTED
    with refused("INVALID_ARGUMENT", "INVALID_POLICY"):
        ends.publish(policy=skv.policy(refine="RAW"))


def test_metrics_count_what_moved(ends, prefill, decode):
    before = prefill.metrics(), decode.metrics()
    commit(ends)
    ends.target.refine(ends.name, ends.name + ".r")
    report = ends.target.wait(ends.name + ".r", timeout_s=30)
    applied = ends.target.apply_refinement(ends.name + ".r").applied_bytes
    until(lambda: ends.source.get_transfer(ends.name).refined_wire_bytes > 0)
    base = ends.target.get_transfer(ends.name)
    for client in (ends.source, ends.target):
        client.release(ends.name)
    for role, daemon, was in (("sender", prefill, before[0]), ("receiver", decode, before[1])):
        now = daemon.metrics()

        def grown(name, now=now, was=was):
            name = "spectrumkv_" + name
            return now[name] - was.get(name, 0)

        assert grown(f'refinements_total{{role="{role}",outcome="committed"}}') == 1
        assert grown(f'retentions_total{{role="{role}",result="kept"}}') == 1
        assert grown(f'transfers_total{{role="{role}",outcome="committed"}}') == 1, "a refinement is none"
        assert grown(f'wire_bytes_total{{role="{role}"}}') == base.wire_bytes + report.wire_bytes
        assert grown(f'saved_bytes_total{{role="{role}"}}') == base.saved_bytes
        assert grown("refined_bytes_total") == (report.wire_bytes if role == "sender" else 0)
        assert grown("refinement_applied_bytes_total") == (applied if role == "receiver" else 0)


def test_selected_tokens_alone_and_their_exact_words(ends):
    commit(ends)
    coarse = words(ends).copy()
    ends.target.refine(ends.name, ends.name + ".r", tokens=[(3, 5), (80, 2)], layers=[1])
    ends.target.wait(ends.name + ".r", timeout_s=30)
    ends.target.apply_refinement(ends.name + ".r")
    want = coarse.copy()
    for first, count in ((3, 5), (80, 2)):
        want[1, :, first : first + count] = ends.kv[1, :, first : first + count]
    assert (words(ends) == want).all()
    ends.source.release(ends.name)


def test_what_was_not_to_be_retained(ends):
    ends.expect(refinable=True)
    ends.send(policy=skv.policy(**{**COARSE, "retain_seconds": 0}))
    ends.both_end(COMMITTED)
    with refused("FAILED_PRECONDITION", "NOT_RETAINED"):
        ends.target.refine(ends.name, ends.name + ".r")


def test_decoding_goes_on_in_the_last_page(ends):
    """What the worker has written behind the request's tokens stays as it is."""
    commit(ends)
    page, row = ends.there.blocks[0][TOKENS // 8], TOKENS % 8
    mine = np.full_like(landed(ends.there, 0)[:, :, page, row:], 0x1234)
    ends.there.pool.kv(0).view("<u2")[:, :, page, row:] = mine
    for direct in (False, True):
        name = f"{ends.name}.{direct}"
        ends.target.refine(ends.name, name, tier="RAW" if direct else "Q8", direct=direct)
        ends.target.wait(name, timeout_s=30)
        if not direct:
            ends.target.apply_refinement(name)
    assert (landed(ends.there, 0)[:, :, page, row:] == mine).all()
    assert (words(ends) == ends.kv).all()


def test_a_source_that_was_released(ends):
    commit(ends)
    ends.source.release(ends.name)
    coarse = words(ends).copy()
    ends.target.refine(ends.name, ends.name + ".r")
    report = ended(ends.target, ends.name + ".r")
    assert (report.state, report.reason) == (FAILED, "NOT_RETAINED"), report
    assert ends.target.get_transfer(ends.name).state == COMMITTED
    with refused("FAILED_PRECONDITION", "REFINEMENT_DROPPED"):
        ends.target.apply_refinement(ends.name + ".r")
    assert (words(ends) == coarse).all()


def test_a_watch_until_exact_ends_when_nothing_is_retained(ends):
    commit(ends, retain_seconds=1)
    events = [event.WhichOneof("event") for event in ends.target.watch(ends.name, timeout_s=30, until_exact=True)]
    assert events[-2:] == ["terminal", "released"]
    assert not ends.source.wait_exact(ends.name, timeout_s=30).exact
    with pytest.raises(skv.TransferFailed):
        ends.target.expect(ends.name + ".late", pool=ends.there.pool, token_count=TOKENS, blocks=ends.there.blocks, deadline_ms=300)
        ends.target.wait_exact(ends.name + ".late", timeout_s=30)


def test_unregistering_a_pool_does_not_wait_for_what_is_retained(ends, transfer_id):
    commit(ends)
    ends.here.pool.close()
    ends.target.refine(ends.name, ends.name + ".r")
    assert ended(ends.target, ends.name + ".r").state == FAILED
    assert ends.target.get_transfer(ends.name).state == COMMITTED


def test_requests_that_cannot_be(ends, decode):
    commit(ends)
    name = ends.name
    for field, options in {
        "selection.tokens": dict(tokens=[(TOKENS, 1)]), "selection.layers": dict(layers=[2]),
        "selection.scores": dict(scores=[1.0]), "budget": dict(budget=0.0), "tier": dict(tier="DROP"),
    }.items():  # fmt: skip
        reason = {"budget": "INVALID_BUDGET", "tier": "INVALID_TIERS"}.get(field, "INVALID_SELECTION")
        with refused("INVALID_ARGUMENT", reason, field=field):
            ends.target.refine(name, name + ".x", **options)
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        ends.target.refine("no-such-transfer", name + ".x")
    with refused("INVALID_ARGUMENT", "INVALID_TRANSFER_ID"):
        ends.target.refine(name, name)
    with refused("FAILED_PRECONDITION", "NOT_A_REFINEMENT"):
        ends.target.apply_refinement(name)
    with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        ends.publish(policy=skv.policy(retain_seconds=1e9))
    with refused("UNIMPLEMENTED", "RETENTION_OF_PARTS"):
        ends.publish(policy=skv.policy(retain_seconds=1), part=(0, 2))
    with refused("UNIMPLEMENTED", "RETENTION_OF_PARTS"):
        ends.expect(refinable=True, part=(0, 2))


def test_a_prefill_daemon_that_is_killed_and_restarted():
    prefill, decode = RealDaemon(), RealDaemon()
    try:
        with prefill.client() as source, decode.client() as target:
            ends = Ends(source, target, prefill, decode, "killed", skv.Group(**GROUP), TOKENS)
            commit(ends)
            coarse = words(ends).copy()
            prefill.restart()
            target.refine("killed", "killed.r")
            report = ended(target, "killed.r")
            assert (report.state, report.reason) == (FAILED, "PEER_RESTARTED"), report
            prefill.kill()
            target.refine("killed", "killed.r2")
            report = ended(target, "killed.r2")
            assert report.state == FAILED and report.reason in ("PEER_GONE", "PEER_UNREACHABLE"), report
            assert target.get_transfer("killed").state == COMMITTED
            assert (words(ends) == coarse).all()
            ends.there.pool.close()
    finally:
        for daemon in (prefill, decode):
            daemon.stop()
            daemon.remove()


def test_other_data_types(source, target, prefill, decode, transfer_id):
    """A bfloat16 source in a float32 destination: exact, and twice the staging."""
    rng = np.random.default_rng(3)
    group = skv.Group(**{**GROUP, "dtype": "bfloat16"})
    wide = skv.Group(**{**GROUP, "dtype": "float32"})
    kv = random_words(rng, (3, 2, TOKENS, 2, 64), "bfloat16")
    with (
        source.shared_memory_pool([group], model="m") as here,
        target.shared_memory_pool([wide], model="m") as there,
    ):
        blocks = list(range(12))
        padded = np.zeros((3, 2, 96, 2, 64), "<u2")
        padded[:, :, :TOKENS] = kv
        here.kv(0).view("<u2")[:, :, blocks] = padded.reshape(3, 2, 12, 8, 2, 64)
        target.expect(transfer_id, pool=there, token_count=TOKENS, blocks=blocks, refinable=True)
        source.send(transfer_id, peer=decode.peer, pool=here, token_count=TOKENS, blocks=blocks, policy=skv.policy(**COARSE))
        target.wait(transfer_id, timeout_s=30)
        target.refine(transfer_id, transfer_id + ".r")
        target.wait(transfer_id + ".r", timeout_s=30)
        target.apply_refinement(transfer_id + ".r")
        got = there.kv(0)[:, :, blocks].reshape(3, 2, 96, 2, 64)[:, :, :TOKENS].view("<u4")
        assert (got == kv.astype("<u4") << 16).all()


RATE = 60_000  # bytes a second: what is refined takes about two seconds


@contextlib.contextmanager
def slowly(name, **keys):
    """A refinement that has begun, at a rate that leaves time for mishaps: ends, relay to the source's daemon."""
    keys = dict(refine__max_rate_bytes=RATE, transfer__progress_timeout_ms=1500, **keys)
    with running(**keys) as prefill, running(**keys) as decode, prefill.client() as source, decode.client() as target:
        ends = Ends(source, target, prefill, decode, name, skv.Group(**GROUP), TOKENS)
        with contextlib.ExitStack() as pools, Proxy(prefill.peer) as relay:
            pools.enter_context(ends.there.pool)
            commit(ends)
            target.refine(name, name + ".r", peer=relay.address)
            until(lambda: target.get_transfer(name + ".r").staged_bytes > 0)
            assert target.get_transfer(name + ".r").state != COMMITTED
            yield ends, relay, prefill


def test_the_rate_is_kept():
    with slowly("rate") as (ends, _, _):
        report = ends.target.wait("rate.r", timeout_s=60)
        assert report.wire_bytes / report.duration_seconds < RATE * 1.3, "five of six chunks have been waited for"
        assert ends.target.apply_refinement("rate.r").exact
        assert (words(ends) == ends.kv).all()


def test_what_has_arrived_may_be_applied_while_more_comes():
    with slowly("early") as (ends, _, _):
        coarse = words(ends).copy()
        first = ends.target.apply_refinement("early.r")
        assert first.applied_bytes > 0 and not first.complete and not first.exact
        now = words(ends)
        assert ((now == coarse) | (now == ends.kv)).all() and (now != coarse).any()
        ends.target.wait("early.r", timeout_s=60)
        assert ends.target.apply_refinement("early.r").exact
        assert (words(ends) == ends.kv).all()


def test_a_link_that_comes_back_goes_on():
    with slowly("resumed") as (ends, relay, _):
        relay.break_down()
        time.sleep(0.3)
        relay.is_down = False
        report = ends.target.wait("resumed.r", timeout_s=60)
        assert report.attempts > 1 and report.chunks > report.chunks_resent
        assert ends.target.apply_refinement("resumed.r").exact
        assert (words(ends) == ends.kv).all()


def test_cancelled_half_way():
    with slowly("cancelled") as (ends, _, _):
        coarse = words(ends).copy()
        assert ends.target.cancel("cancelled.r").state == CANCELLED
        assert (words(ends) == coarse).all()
        until(lambda: ends.source.get_transfer("cancelled.r").state == CANCELLED)
        # Nothing stands in the way of the next.
        ends.target.refine("cancelled", "cancelled.r2", tokens=[(0, 8)])
        assert ends.target.wait("cancelled.r2", timeout_s=30).state == COMMITTED


def test_a_prefill_daemon_that_dies_half_way():
    with slowly("dead") as (ends, _, prefill):
        ends.target.apply_refinement("dead.r")
        partly = words(ends).copy()
        prefill.kill()
        report = ended(ends.target, "dead.r")
        assert report.state == FAILED and report.reason in ("PEER_GONE", "PEER_UNREACHABLE", "PEER_SILENT"), report
        assert ends.target.get_transfer("dead").state == COMMITTED
        assert (words(ends) == partly).all(), "what was applied stays"
        with refused("FAILED_PRECONDITION", "REFINEMENT_DROPPED"):
            ends.target.apply_refinement("dead.r")


def test_released_half_way():
    """When release answers, the source's blocks may be written: nothing of that arrives."""
    with slowly("released") as (ends, _, _):
        ends.source.release("released")
        ends.here.pool.kv(0).view("<u2")[:] = 0x7777
        report = ended(ends.target, "released.r")
        assert (report.state, report.reason) == (FAILED, "RELEASED"), report
        assert not (words(ends) == 0x7777).any()
