"""Lives of transfers: order of calls, layer-wise sources, cancel, release, deadlines, tokens, dropped tokens."""

import threading
import time

import numpy as np
import pytest
from ends import CANCELLED, COMMITTED, EXPIRED, RAW, TOKENS, WAITING, Ends, ended, until
from moves import check, expected_of, fill, make_side, move, poison, random_words, scattered, small_group, tier_ids
from real_daemon import refused

import spectrumkv as skv


ORDERS = [("expect", "send"), ("send", "expect"), ("publish", "fetch"), ("fetch", "publish")]


@pytest.mark.parametrize("pause_s", [0, 0.3])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_either_half_may_come_first(order, pause_s, ends):
    getattr(ends, order[0])()
    time.sleep(pause_s)
    getattr(ends, order[1])()
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def layer_wise(ends, layers, policy, pull):
    """Writes layer l only once the destination has layer l - 1."""
    words = ends.here.pool.kv()
    kv = words.copy()
    words[:] = 0
    ready = threading.Semaphore(0)
    seen = []

    def on_layers(count):
        seen.append(count)
        ready.release()

    start = (ends.publish, ends.fetch) if pull else (ends.send, ends.expect)
    start[0](layerwise=True, policy=policy)
    start[1]()
    reports = []
    watcher = threading.Thread(
        target=lambda: reports.append(ends.target.wait(ends.name, timeout_s=60, on_layers_ready=on_layers)))  # fmt: skip
    watcher.start()
    for layer in range(layers):
        words[layer] = kv[layer]
        ends.source.advance(ends.name, layers=layer + 1, tokens=ends.tokens)
        assert ready.acquire(timeout=30), f"layer {layer} was never ready"
    watcher.join(30)
    assert reports and reports[0].state == COMMITTED
    assert seen == list(range(1, layers + 1))
    return reports[0]


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("policy", ["raw", "greedy", "optimal"])
def test_layer_wise_source(policy, pull, source, target, prefill, decode, transfer_id):
    group = small_group(layers=range(6), head_dim=64, num_blocks=40)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=70)
    with ends.here.pool, ends.there.pool:
        greedy = skv.policy(allocator="GREEDY", budget=0.6, importance="POSITION", tiers=["RAW", "P8", "P4"])
        optimal = skv.policy(allocator="OPTIMAL", budget=0.6)
        report = layer_wise(ends, 6, {"raw": skv.policy(**RAW), "greedy": greedy, "optimal": optimal}[policy], pull)
        if policy == "raw":
            check(ends.there, [ends.kv])
        else:
            assert report.wire_bytes <= 0.6 * report.kv_bytes
            assert report.layers_ready == 6


def test_optimal_sends_what_it_planned(source, target, prefill, decode, transfer_id):
    """The dry run says the bytes that travel; a larger budget never has a larger error."""
    group = small_group(layers=range(4), heads=3, head_dim=64, num_blocks=60)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=200)
    exact = ends.kv.view(np.float16).astype(np.float64)
    with ends.here.pool, ends.there.pool:
        before = np.inf
        for budget in (0.2, 0.3, 0.5):
            policy = skv.policy(allocator="OPTIMAL", budget=budget)
            plan = source.plan(ends.here.pool, 200, ends.here.blocks[0], policy)
            name = f"{transfer_id}-{budget}"
            target.expect(name, pool=ends.there.pool, token_count=200, blocks=ends.there.blocks[0])
            source.send(name, peer=decode.peer, pool=ends.here.pool, token_count=200,
                        blocks=ends.here.blocks[0], policy=policy)  # fmt: skip
            report = target.wait(name, timeout_s=60)
            assert report.wire_bytes == plan.wire_bytes <= budget * report.kv_bytes
            assert report.wire_bytes > 0.98 * budget * report.kv_bytes
            landed = ends.there.pool.read_tokens(200, ends.there.blocks[0]).astype(np.float64)
            error = ((landed - exact) ** 2).sum()
            assert 0 < error < before
            before = error


def test_chunked_prefill_advances_by_tokens(source, target, prefill, decode, transfer_id):
    """Rectangles of layers and tokens, in any order; the union counts."""
    group = small_group(layers=range(3), heads=8, head_dim=128, block_tokens=64, num_blocks=12)
    ends = Ends(source, target, prefill, decode, transfer_id, group, tokens=600)
    with ends.here.pool, ends.there.pool:
        ends.expect()
        ends.send(layerwise=True)
        for layers, tokens in ((3, 100), (1, 600), (3, 300), (2, 600), (1, 5)):
            source.advance(ends.name, layers=layers, tokens=tokens)
        time.sleep(0.2)
        assert target.get_transfer(ends.name).layers_ready <= 2
        source.advance(ends.name, layers=3, tokens=600)
        ends.both_end(COMMITTED)
        check(ends.there, [ends.kv])
        with refused("FAILED_PRECONDITION", "TRANSFER_TERMINAL"):
            source.advance(ends.name, layers=3, tokens=600)


def test_advance_that_is_wrong(ends):
    ends.send(layerwise=True)
    for layers, tokens in ((3, TOKENS), (1, TOKENS + 1)):
        with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
            ends.source.advance(ends.name, layers=layers, tokens=tokens)
    with refused("INVALID_ARGUMENT", "INVALID_SCORES"):
        ends.source.advance(ends.name, layers=1, tokens=TOKENS, scores=[1.0] * (TOKENS - 1))
    ends.source.cancel(ends.name)


@pytest.mark.parametrize("by", ["source", "target"])
@pytest.mark.parametrize("phase", ["alone", "joined", "half_way", "committed"])
def test_cancel(phase, by, ends):
    client = getattr(ends, by)
    if phase == "alone":
        ends.send() if by == "source" else ends.expect()
        report = client.cancel(ends.name)
        assert report.state == CANCELLED and report.reason == "CANCELLED"
        # The other half, coming late, learns it at once.
        ends.expect() if by == "source" else ends.send()
        other = ends.target if by == "source" else ends.source
        if by == "source":  # the dialler is gone; nobody will dial again
            other.cancel(ends.name)
        assert ended(other, ends.name).state == CANCELLED
        assert ends.untouched()
        return
    ends.expect()
    ends.send(layerwise=phase != "committed")
    if phase == "committed":
        ends.both_end(COMMITTED)
        assert client.cancel(ends.name).state == COMMITTED
        check(ends.there, [ends.kv])
        return
    if phase == "half_way":
        ends.source.advance(ends.name, layers=1, tokens=TOKENS)
        until(lambda: ends.target.get_transfer(ends.name).layers_ready == 1)
    else:
        until(lambda: ends.source.get_transfer(ends.name).state != WAITING)
    assert client.cancel(ends.name).state == CANCELLED
    landed = ends.there.pool.segment.memory.copy()
    ends.both_end(CANCELLED)
    # No byte lands late, whatever the source does now.
    with refused("FAILED_PRECONDITION", "TRANSFER_TERMINAL"):
        ends.source.advance(ends.name, layers=2, tokens=TOKENS)
    time.sleep(0.2)
    if by == "target":
        assert (ends.there.pool.segment.memory == landed).all()
    # The blocks are free again on both sides.
    ends.name += ".again"
    poison(ends.there)
    ends.expect()
    ends.send()
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def test_published_and_released(ends):
    ends.publish()
    ends.source.release(ends.name)
    assert ended(ends.source, ends.name).state == CANCELLED
    ends.fetch(deadline_ms=5000)
    assert ended(ends.target, ends.name).state != COMMITTED
    assert ends.untouched()


def test_released_transfers_are_forgotten(ends):
    ends.expect()
    with refused("FAILED_PRECONDITION", "TRANSFER_ACTIVE"):
        ends.target.release(ends.name)
    ends.send()
    ends.both_end(COMMITTED)
    ends.source.release(ends.name)
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        ends.source.get_transfer(ends.name)


def test_deadline(ends):
    ends.expect(deadline_ms=200)
    report = ended(ends.target, ends.name)
    assert report.state == EXPIRED and report.reason == "DEADLINE_EXCEEDED"
    ends.name += ".send"
    ends.send(deadline_ms=200)
    report = ended(ends.source, ends.name)
    assert report.state == EXPIRED and report.reason == "DEADLINE_EXCEEDED"
    assert ends.untouched()


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_transfer_token(pull, ends):
    right, wrong = b"0123456789abcdef", b"0123456789abcdeF"
    acceptor, dialler = (ends.publish, ends.fetch) if pull else (ends.expect, ends.send)
    for number, token in enumerate((wrong, b"")):
        ends.name = f"{ends.name}.{number}"
        acceptor(token=right)
        dialler(token=token)
        report = ended(ends.target if pull else ends.source, ends.name)
        assert (report.code, report.reason) == (7, "TOKEN_MISMATCH"), report  # PERMISSION_DENIED
        waiting = ends.source if pull else ends.target
        assert waiting.get_transfer(ends.name).state == WAITING
        waiting.cancel(ends.name)
    assert ends.untouched()
    ends.name += ".right"
    acceptor(token=right)
    dialler(token=right)
    ends.both_end(COMMITTED)
    check(ends.there, [ends.kv])


def test_dropped_tokens_leave_no_hole(source, target, prefill, decode, transfer_id):
    rng = np.random.default_rng(37)
    tokens = 60
    here_group = small_group(head_dim=64, num_blocks=30)
    there_group = small_group(head_dim=64, num_blocks=20, block_tokens=8, layout="HND")
    kv = random_words(rng, (2, 2, tokens, 2, 64), "float16")
    here = make_side(source, prefill, [here_group], {0: scattered(rng, here_group, tokens)})
    there = make_side(target, decode, [there_group], {0: scattered(rng, there_group, tokens)})
    policy = skv.policy(allocator="PDTRIM", budget=0.4, tiers=["RAW", "Q8", "Q4", "DROP"], scores=rng.random(tokens))
    with here.pool, there.pool:
        fill(here, [kv])
        poison(there)
        plan = source.plan(here.pool, tokens, here.blocks, policy)
        dropped = [t for run in plan.dropped_tokens for t in range(run.first, run.first + run.count)]
        kept = [t for t in range(tokens) if t not in dropped]
        assert dropped and kept and len(plan.token_tiers_k) == len(kept)
        expected, wire_bytes = expected_of([np.ascontiguousarray(kv[:, :, kept])], [here_group], [there_group],
                                           tier_ids(plan.token_tiers_k), tier_ids(plan.token_tiers_v))  # fmt: skip
        sent, received = move(transfer_id, source, target, prefill, decode, here, there, tokens, policy=policy,
                              accept_dropped=True)  # fmt: skip
        check(there, expected)
        for report in (sent, received):
            runs = [(run.first, run.count) for run in report.dropped_tokens]
            assert runs == [(run.first, run.count) for run in plan.dropped_tokens]
            assert report.kept_tokens == len(kept) and report.wire_bytes == wire_bytes
        with pytest.raises(skv.TransferFailed) as failed:
            move(transfer_id + "b", source, target, prefill, decode, here, there, tokens, policy=policy)
        assert (failed.value.code, failed.value.reason) == ("FAILED_PRECONDITION", "DROP_NOT_ACCEPTED")
