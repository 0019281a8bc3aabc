"""Links that are measured, times that are predicted, budgets that the daemon chooses: over a relay of a known speed."""

import threading
import time

import numpy as np
import pytest
from moves import check, fill, make_side, poison, random_words, scattered, unique
from real_daemon import SANITIZER_KIB, refused, running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2, report_pb2

TOKENS, LAYERS = 700, 8
# So slow that nothing else can hold a transfer up. The relay is never faster; on a busy machine it may be slower.
RATE = 12e6
FASTER, SLOWER = 1.1, 5


@pytest.fixture(scope="module")
def pair():
    """Daemons of this module's own: what they have measured is part of the tests."""
    with running() as here, running() as there:
        with here.client() as source, there.client() as target:
            yield here, there, source, target


@pytest.fixture(scope="module")
def sides(pair):
    """11 MB of KV in two pools."""
    here, there, source, target = pair
    rng = np.random.default_rng(29)
    group = skv.Group(layers=range(LAYERS), heads=8, head_dim=64, block_tokens=16, num_blocks=64)
    kv = random_words(rng, (LAYERS, 2, TOKENS, 8, 64), "float16")
    a = make_side(source, here, [group], {0: scattered(rng, group, TOKENS)})
    b = make_side(target, there, [group], {0: scattered(rng, group, TOKENS)})
    with a.pool, b.pool:
        fill(a, [kv])
        yield a, b, kv


@pytest.fixture(scope="module")
def slow(pair):
    """A way to the second daemon that carries RATE bytes a second."""
    with Proxy(pair[1].peer, bytes_per_second=RATE) as proxy:
        yield proxy.address


def send(pair, sides, peer, policy, **options):
    """A push to its end: the sender's and the receiver's report."""
    source, target = pair[2:]
    a, b, _ = sides
    name = unique("link")
    target.expect(name, pool=b.pool, token_count=TOKENS, blocks=b.blocks)
    source.send(name, peer=peer, pool=a.pool, token_count=TOKENS, blocks=a.blocks, policy=policy, **options)
    return source.wait(name, timeout_s=60), target.wait(name, timeout_s=60)


def plan(pair, sides, policy, **options):
    return pair[2].plan(sides[0].pool, TOKENS, sides[0].blocks, policy, **options)


def reason(choice):
    return report_pb2.BudgetReason.Name(choice.reason).removeprefix("BUDGET_REASON_")


def limited_by(report):
    return report_pb2.LimitedBy.Name(report.limited_by).removeprefix("LIMITED_BY_")


def peer_info(daemon, address):
    with daemon.admin() as admin:
        answer = admin.ListPeers(admin_service_pb2.ListPeersRequest())
    found = [peer for peer in answer.peers if peer.address == address]
    return (found[0] if found else None), answer.stages


RAW = skv.policy(allocator="RAW", budget=1.1)


def test_a_link_nobody_used_is_unknown(pair, sides):
    """First: nothing has been sent yet."""
    _, stages = peer_info(pair[0], "")
    assert stages.threads == 2
    for rates in (stages.encode, stages.decode):  # measured at the start
        assert min(rates.raw_bytes_per_second, rates.plain_bytes_per_second, rates.rotated_bytes_per_second) > 0
    answer = plan(pair, sides, RAW, peer=pair[1].peer)
    assert not answer.HasField("predicted_seconds") and answer.prediction_missing == "LINK_UNKNOWN"
    answer = plan(pair, sides, RAW)
    assert not answer.HasField("predicted_seconds") and answer.prediction_missing == "NO_LINK_ASKED"
    auto = skv.policy(budget="auto", target_seconds=0.5)
    choice = plan(pair, sides, auto, peer=pair[1].peer).budget_choice
    assert reason(choice) == "LINK_UNKNOWN" and choice.budget == 0.5
    assert not choice.HasField("predicted_seconds") and not choice.HasField("link_bytes_per_second")


def test_the_first_automatic_budget_is_the_default(pair, sides, slow):
    before = pair[0].metrics()
    sent, received = send(pair, sides, slow, skv.policy(budget="auto", target_seconds=0.5))
    assert reason(sent.budget_choice) == "LINK_UNKNOWN" and sent.budget == 0.5
    assert sent.wire_bytes <= 0.5 * sent.kv_bytes
    assert not received.HasField("budget_choice")
    name = 'spectrumkv_budget_choices_total{reason="link_unknown"}'
    assert pair[0].metrics()[name] == before[name] + 1


def test_a_link_is_measured(pair, sides, slow):
    before = pair[0].metrics()
    poison(sides[1])
    sent, received = send(pair, sides, slow, RAW)
    check(sides[1], [sides[2]])
    assert limited_by(sent) == "LINK" and limited_by(received) == "PEER"
    assert 0.5 * sent.duration_seconds < sent.limited_seconds <= sent.duration_seconds
    assert RATE / SLOWER < sent.measured_link_bytes_per_second < RATE * FASTER
    assert RATE / SLOWER < sent.link_bytes_per_second < RATE * FASTER
    info, stages = peer_info(pair[0], slow)
    assert info.link_bytes_per_second == sent.link_bytes_per_second
    assert 0 <= info.link_age_seconds < 30
    assert info.decode.HasField("raw_bytes_per_second") and 0 < info.setup_seconds < 1
    assert stages.HasField("plan_bytes_per_second")
    after = pair[0].metrics()
    for name in ("spectrumkv_link_rate_bytes_per_second_count",
                 'spectrumkv_transfers_limited_total{role="sender",limited_by="link"}'):  # fmt: skip
        assert after[name] == before[name] + 1, name
    assert not any(slow in name for name in after), "no series names a peer"


def test_small_transfers_do_not_disturb_the_measurement(pair, sides, slow):
    source, target = pair[2:]
    a, b, _ = sides
    before, _ = peer_info(pair[0], slow)
    for _ in range(20):
        name = unique("small")
        target.expect(name, pool=b.pool, token_count=8, blocks={0: b.blocks[0][:1]})
        source.send(name, peer=slow, pool=a.pool, token_count=8, blocks={0: a.blocks[0][:1]}, policy=RAW)
        assert not source.wait(name, timeout_s=60).HasField("measured_link_bytes_per_second")
        target.wait(name, timeout_s=60)
    after, _ = peer_info(pair[0], slow)
    assert after.link_bytes_per_second == before.link_bytes_per_second


@pytest.mark.parametrize("policy", [RAW, skv.policy(budget=0.5), skv.policy(budget=0.2)], ids=["raw", "half", "fifth"])
def test_the_time_is_predicted(policy, pair, sides, slow):
    answer = plan(pair, sides, policy, peer=slow)
    assert answer.prediction_missing == ""
    if not SANITIZER_KIB:  # there the codec is a hundred times slower, and slower than the link
        assert report_pb2.LimitedBy.Name(answer.predicted_limited_by) == "LIMITED_BY_LINK"
    sent, _ = send(pair, sides, slow, policy)
    print(f"predicted {answer.predicted_seconds:.3f} s, took {sent.duration_seconds:.3f} s")
    assert answer.wire_bytes == sent.wire_bytes
    assert answer.predicted_seconds > answer.wire_bytes / answer.link_bytes_per_second
    assert sent.duration_seconds / SLOWER < answer.predicted_seconds < sent.duration_seconds * SLOWER


def test_a_link_may_be_named(pair, sides):
    fast = plan(pair, sides, RAW, link_bytes_per_second=1e12)
    slow = plan(pair, sides, RAW, link_bytes_per_second=1e6)
    assert slow.link_bytes_per_second == 1e6
    assert slow.predicted_seconds > slow.wire_bytes / 1e6 > 10 * fast.predicted_seconds
    assert report_pb2.LimitedBy.Name(slow.predicted_limited_by) == "LIMITED_BY_LINK"
    assert report_pb2.LimitedBy.Name(fast.predicted_limited_by) != "LIMITED_BY_LINK"
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with refused("INVALID_ARGUMENT", "OUT_OF_RANGE", field="link_bytes_per_second"):
            plan(pair, sides, RAW, link_bytes_per_second=rate)
    with refused("INVALID_ARGUMENT", "INVALID_PEER"):
        plan(pair, sides, RAW, peer="nowhere")


def test_attention_takes_time_too():
    """What RECENT_QUERIES costs is in the prediction, in proportion to the queries. In a daemon that never met a peer, for a
    handshake it remembers would hide what is done meanwhile."""
    group = skv.Group(layers=range(LAYERS), heads=8, head_dim=64, block_tokens=16, num_blocks=64)
    with running() as daemon, daemon.client() as client:
        side = make_side(client, daemon, [group], {0: scattered(np.random.default_rng(31), group, TOKENS)})
        with side.pool:

            def seconds(count):
                queries = np.zeros((LAYERS, count, 32, 64), "float16")
                asked = skv.recent_queries(queries, range(TOKENS - count, TOKENS)) if count else None
                policy = skv.policy(budget=0.5, queries=asked)
                answer = client.plan(side.pool, TOKENS, side.blocks, policy, link_bytes_per_second=1e12)
                assert answer.prediction_missing == ""
                return answer.predicted_seconds

            few, many = seconds(8) - seconds(0), seconds(64) - seconds(0)
            print(f"8 queries {few * 1e3:.2f} ms, 64 {many * 1e3:.2f} ms")
            assert 4 * few < many < 16 * few


def test_a_budget_is_chosen_for_the_target(pair, sides, slow):
    raw = plan(pair, sides, RAW, peer=slow)
    target = raw.predicted_seconds * 0.45
    auto = skv.policy(budget="auto", target_seconds=target)
    assert reason(plan(pair, sides, auto, peer=slow).budget_choice) == "MEETS_TARGET"
    sent, _ = send(pair, sides, slow, auto)
    choice = sent.budget_choice
    assert reason(choice) == "MEETS_TARGET" and choice.target_seconds == target
    assert sent.budget == choice.budget and 0.2 < choice.budget < 0.6
    assert choice.predicted_seconds <= target and choice.link_bytes_per_second > 0
    assert sent.wire_bytes <= choice.budget * sent.kv_bytes
    print(f"target {target:.3f} s, took {sent.duration_seconds:.3f} s")


def test_raw_where_there_is_time(pair, sides, slow):
    sent, _ = send(pair, sides, slow, skv.policy(budget="auto", target_seconds=60))
    assert reason(sent.budget_choice) == "RAW_MEETS_TARGET" and sent.budget_choice.budget == 1
    assert [skv.tier_name(tier.tier) for tier in sent.tiers] == ["RAW"]


def test_the_least_budget_where_the_target_is_out_of_reach(pair, sides, slow):
    sent, _ = send(pair, sides, slow, skv.policy(budget="auto", target_seconds=1e-4))
    choice = sent.budget_choice
    assert reason(choice) == "OUT_OF_REACH" and choice.budget == choice.min_budget == 0.2
    assert choice.predicted_seconds > 1e-4
    assert sent.wire_bytes <= 0.2 * sent.kv_bytes
    sent, _ = send(pair, sides, slow, skv.policy(budget="auto", target_seconds=1e-4, min_budget=0.3))
    assert sent.budget_choice.budget == 0.3 and sent.wire_bytes > 0.2 * sent.kv_bytes


def test_events_say_what_was_chosen(pair, sides, slow):
    source, target = pair[2:]
    a, b, _ = sides
    name = unique("events")
    source.send(name, peer=slow, pool=a.pool, token_count=TOKENS, blocks=a.blocks,
                policy=skv.policy(budget="auto", target_seconds=1e-4))  # fmt: skip
    events = source.watch(name, timeout_s=60)
    threading.Timer(0.3, lambda: target.expect(name, pool=b.pool, token_count=TOKENS, blocks=b.blocks)).start()
    seen = list(events)
    target.wait(name, timeout_s=60)
    progress = [event.progress for event in seen if event.HasField("progress")]
    assert progress and all(reason(event.budget_choice) == "OUT_OF_REACH" for event in progress)
    assert reason(seen[-1].terminal.budget_choice) == "OUT_OF_REACH"


def test_a_publish_goes_by_the_slowest_link(pair, sides):
    source, target = pair[2:]
    a, b, _ = sides
    name = unique("published")
    source.publish(name, pool=a.pool, token_count=TOKENS, blocks=a.blocks,
                   policy=skv.policy(budget="auto", target_seconds=0.2))  # fmt: skip
    target.fetch(name, peer=pair[0].peer, pool=b.pool, token_count=TOKENS, blocks=b.blocks)
    sent = source.wait(name, timeout_s=60)
    target.wait(name, timeout_s=60)
    assert reason(sent.budget_choice) in ("MEETS_TARGET", "OUT_OF_REACH")
    assert RATE / SLOWER < sent.budget_choice.link_bytes_per_second < RATE * FASTER


def test_who_waited_for_whom(pair, sides):
    """The other half that comes late, and a source that is written late."""
    source, target = pair[2:]
    a, b, _ = sides
    name = unique("late")
    source.send(name, peer=pair[1].peer, pool=a.pool, token_count=TOKENS, blocks=a.blocks, policy=RAW)
    time.sleep(1)
    target.expect(name, pool=b.pool, token_count=TOKENS, blocks=b.blocks)
    sent = source.wait(name, timeout_s=60)
    target.wait(name, timeout_s=60)
    assert limited_by(sent) == "PEER" and sent.limited_seconds > 0.9
    name = unique("written-late")
    target.expect(name, pool=b.pool, token_count=TOKENS, blocks=b.blocks)
    source.send(name, peer=pair[1].peer, pool=a.pool, token_count=TOKENS, blocks=a.blocks, policy=RAW, layerwise=True)
    time.sleep(1)
    source.advance(name, layers=LAYERS, tokens=TOKENS)
    sent, received = source.wait(name, timeout_s=60), target.wait(name, timeout_s=60)
    assert limited_by(sent) == "SOURCE" and sent.limited_seconds > 0.9
    assert limited_by(received) == "PEER"


def test_what_makes_no_sense_is_refused(pair, sides):
    both = skv.policy(budget="auto", target_seconds=1)
    both.budget = 0.3
    with refused("INVALID_ARGUMENT", "INVALID_POLICY"):
        plan(pair, sides, both)
    for target in (0, -1, 3601, float("nan")):
        with refused("INVALID_ARGUMENT", "INVALID_BUDGET"):
            plan(pair, sides, skv.policy(budget="auto", target_seconds=target))
        with refused("INVALID_ARGUMENT", "INVALID_BUDGET"):
            pair[2].send(unique("senseless"), peer=pair[1].peer, pool=sides[0].pool, token_count=TOKENS,
                         blocks=sides[0].blocks, policy=skv.policy(budget="auto", target_seconds=target))  # fmt: skip
    with refused("INVALID_ARGUMENT", "INVALID_POLICY"):
        plan(pair, sides, skv.policy(budget="auto", target_seconds=1, allocator="RAW"))
    for wrong in (dict(budget="auto"), dict(target_seconds=1), dict(budget=0.5, min_budget=0.2), dict(budget="half")):
        with pytest.raises(ValueError):
            skv.policy(**wrong)
