"""What /metrics says, and whether it is true: against promtool, against the reports, against the bytes on the socket."""

import re
import shutil
import subprocess
import time

import numpy as np
import pytest
from moves import check, fill, make_side, move, poison, random_words, scattered, small_group, unique
from real_daemon import PROGRAM, running
from tcp_proxy import Proxy

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2, worker_service_pb2

STREAM_ALLOWANCE = 64 << 10
TIERS = ("RAW", "Q8", "P8", "Q4", "P4", "Q3", "Q2")


@pytest.fixture(scope="module")
def pair():
    """Daemons of this module's own: others' transfers would be counted, too."""
    every_chunk = dict(metrics__reconstruction_sample_chunks=1)
    with running(peer__streams=2, transfer__credits_per_transfer=2, **every_chunk) as here, running(
        peer__streams=2, **every_chunk
    ) as there:
        with here.client() as source, there.client() as target:
            yield here, there, source, target


def big_sides(here, there, source, target, *, tokens=900, layers=8):
    """About 15 MB, several chunks per layer."""
    rng = np.random.default_rng(23)
    group = skv.Group(layers=range(layers), heads=8, head_dim=64, block_tokens=16, num_blocks=64)
    kv = random_words(rng, (layers, 2, tokens, 8, 64), "float16")
    a = make_side(source, here, [group], {0: scattered(rng, group, tokens)})
    b = make_side(target, there, [group], {0: scattered(rng, group, tokens)})
    fill(a, [kv])
    poison(b)
    return a, b, kv


def grown(before, after, name):
    return after.get(name, 0) - before.get(name, 0)


def test_promtool_has_nothing_to_say(pair):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("SKIPPED: promtool is not installed")
    for daemon in pair[:2]:
        checked = subprocess.run([promtool, "check", "metrics"], input=daemon.scrape(), text=True, capture_output=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert checked.stdout + checked.stderr == ""


def test_build_info_is_what_the_program_says(pair):
    told = subprocess.run([PROGRAM, "--version"], check=True, text=True, capture_output=True).stdout
    version, revision = re.fullmatch(r"spectrumkvd (\d+\.\d+\.\d+) \((unknown|[0-9a-f]{12,}(?:-dirty)?)\)\n", told).groups()
    info = [name for name in pair[0].metrics() if name.startswith("spectrumkv_build_info")]
    assert info == [f'spectrumkv_build_info{{version="{version}",revision="{revision}"}}']
    with pair[0].admin() as admin:
        assert admin.GetStatus(admin_service_pb2.GetStatusRequest()).version == f"{version} ({revision})"


def test_counters_are_those_of_the_reports(pair):
    here, there, source, target = pair
    a, b, kv = big_sides(here, there, source, target, tokens=300, layers=2)
    before = [here.metrics(), there.metrics()]
    with a.pool, b.pool:
        policy = skv.policy(allocator="GREEDY", budget=0.5, importance="POSITION")
        reports = move(unique("count"), source, target, here, there, a, b, 300, policy=policy)
    after = [here.metrics(), there.metrics()]
    for role, old, new, report in zip(("sender", "receiver"), before, after, reports, strict=True):
        label = f'{{role="{role}"}}'
        assert grown(old, new, f"spectrumkv_kv_bytes_total{label}") == report.kv_bytes == kv.nbytes
        assert grown(old, new, f"spectrumkv_wire_bytes_total{label}") == report.wire_bytes
        assert grown(old, new, f"spectrumkv_saved_bytes_total{label}") == report.kv_bytes - report.wire_bytes
        assert report.saved_bytes == report.kv_bytes - report.wire_bytes
        assert grown(old, new, f"spectrumkv_chunks_total{label}") == report.chunks
        tokens = {skv.tier_name(tier.tier): tier.k_tokens + tier.v_tokens for tier in report.tiers}
        assert sum(tokens.values()) == 2 * 2 * 300
        for tier in TIERS:
            name = f'spectrumkv_tokens_total{{role="{role}",tier="{tier}"}}'
            assert grown(old, new, name) == tokens.get(tier, 0), name
        name = f'spectrumkv_transfers_total{{role="{role}",outcome="committed"}}'
        assert grown(old, new, name) == 1
        other = {"sender": "receiver", "receiver": "sender"}[role]
        assert grown(old, new, f'spectrumkv_wire_bytes_total{{role="{other}"}}') == 0


@pytest.mark.parametrize("budget", [1.1, 0.3])
def test_socket_bytes_are_wire_bytes(budget, pair):
    here, there, source, target = pair
    a, b, kv = big_sides(here, there, source, target)
    name, frames = unique("socket"), here.metrics()["spectrumkv_overhead_bytes_total"]
    allocator = "RAW" if budget > 1 else "GREEDY"
    with a.pool, b.pool, Proxy(there.peer) as proxy:
        target.expect(name, pool=b.pool, token_count=900, blocks=b.blocks)
        source.send(name, peer=proxy.address, pool=a.pool, token_count=900, blocks=a.blocks,
                    policy=skv.policy(budget=budget, allocator=allocator, importance="POSITION"))  # fmt: skip
        target.wait(name, timeout_s=60)
        sent = source.wait(name, timeout_s=60)
        if allocator == "RAW":
            check(b, [kv])
        time.sleep(0.2)  # the last acknowledgements of HTTP/2
        busy = [c for c in proxy.connections if c.up > sent.wire_bytes // 20]
        assert sent.streams == 2 and len(busy) == 2, [c.up for c in proxy.connections]
        control = here.metrics()["spectrumkv_overhead_bytes_total"] - frames
        assert 0 < control < proxy.total() - sent.wire_bytes
        upper = 1.01 * sent.wire_bytes + STREAM_ALLOWANCE * sent.streams
        assert sent.wire_bytes <= proxy.total() <= upper, (sent.wire_bytes, [(c.up, c.down) for c in proxy.connections])
        assert sent.wire_bytes <= budget * sent.kv_bytes


def test_pull_through_the_proxy(pair):
    """The receiver dials: chunks come down the connections."""
    here, there, source, target = pair
    a, b, kv = big_sides(here, there, source, target)
    name = unique("pulled")
    with a.pool, b.pool, Proxy(here.peer) as proxy:
        source.publish(name, pool=a.pool, token_count=900, blocks=a.blocks, policy=skv.policy(allocator="RAW", budget=1.1))
        target.fetch(name, peer=proxy.address, pool=b.pool, token_count=900, blocks=b.blocks)
        received = target.wait(name, timeout_s=60)
        check(b, [kv])
        busy = [c for c in proxy.connections if c.down > received.wire_bytes // 20]
        assert len(busy) == 2
        assert proxy.total() <= 1.01 * received.wire_bytes + STREAM_ALLOWANCE * received.streams


def test_connections_that_are_cut_are_made_again(pair):
    here, there, source, target = pair
    a, b, kv = big_sides(here, there, source, target)
    name = unique("cut")
    before = here.metrics()
    with a.pool, b.pool, Proxy(there.peer) as proxy:
        target.expect(name, pool=b.pool, token_count=900, blocks=b.blocks)
        source.send(name, peer=proxy.address, pool=a.pool, token_count=900, blocks=a.blocks, layerwise=True,
                    policy=skv.policy(allocator="RAW", budget=1.1))  # fmt: skip
        source.advance(name, layers=3, tokens=900)
        while target.get_transfer(name).layers_ready < 3:
            time.sleep(0.01)
        for connection in proxy.connections:
            connection.limit = connection.up + (1 << 20)  # in the middle of a chunk to come
        source.advance(name, layers=8, tokens=900)
        received = target.wait(name, timeout_s=60)
        sent = source.wait(name, timeout_s=60)
        check(b, [kv])
        assert sent.attempts > 1 and received.attempts == sent.attempts
        assert sent.chunks_resent > 0
        assert grown(before, here.metrics(), "spectrumkv_chunks_resent_total") == sent.chunks_resent
        assert sent.chunks == sent.chunks_resent + received.chunks


def _traffic(pair):
    """Transfers of every tier, one with a chosen budget, one that fails, a NaN, a lost lease, a first token."""
    here, there, source, target = pair
    rng = np.random.default_rng(29)
    group = small_group(head_dim=64, num_blocks=64)
    a = make_side(source, here, [group], {0: scattered(rng, group, 130)})
    b = make_side(target, there, [group], {0: scattered(rng, group, 130)})
    with a.pool, b.pool:
        kv = random_words(rng, (2, 2, 130, 2, 64), "float16")
        kv[0, 0, 99, 0, 0] = 0x7E00
        fill(a, [kv])
        for tier in TIERS:
            name = unique("tier")
            move(name, source, target, here, there, a, b, 130,
                 policy=skv.policy(allocator="UNIFORM", uniform_tier=tier, tiers=TIERS, budget=1.1, sinks=0))  # fmt: skip
            target.report_first_token(name, 0.05)
        move(unique("auto"), source, target, here, there, a, b, 130, policy=skv.policy(budget="auto", target_seconds=1))
        name = unique("fails")
        target.expect(name, pool=b.pool, token_count=130, blocks=b.blocks, deadline_ms=100)
        with pytest.raises(skv.TransferFailed):
            target.wait(name, timeout_s=20)
    request = worker_service_pb2.RegisterPoolRequest(request_id=unique("lost"), schema=_owned(), lease_ttl_ms=1000)
    source.worker.RegisterPool(request)
    big_a, big_b, _ = big_sides(here, there, source, target)
    with big_a.pool, big_b.pool:
        move(unique("big"), source, target, here, there, big_a, big_b, 900, policy=skv.policy(allocator="RAW", budget=1.1))
    time.sleep(1.5)


def _owned():
    pools = skv.pools.schema_pb2.PoolSchema(model="m", groups=[small_group().to_proto(0, 0)])
    pools.segments.add().daemon_owned.size_bytes = 1 << 16
    return pools


# Series that need more than transfers: a certificate, a drain, a connection that is cut (which have their own tests).
ELSEWHERE = {"spectrumkv_certificate_expiry_timestamp_seconds", "spectrumkv_certificate_reloads_total",
             "spectrumkv_handshake_failures_total", "spectrumkv_draining", "spectrumkv_chunks_resent_total",
             "spectrumkv_chunks_duplicate_total", "spectrumkv_build_info", "spectrumkv_codec_info", "spectrumkv_inflight_transfers",
             "spectrumkv_worker_connections_refused_total", "spectrumkv_quota_refusals_total",
             "spectrumkv_probe_trials_total", "spectrumkv_gate_verdicts", "spectrumkv_refinements_total",
             "spectrumkv_retentions_total", "spectrumkv_refined_bytes_total",
             "spectrumkv_refinement_applied_bytes_total"}  # fmt: skip


@pytest.fixture(scope="module")
def moved(pair):
    """(before, after): samples of both daemons, summed."""

    def both():
        total = {}
        for daemon in pair[:2]:
            for name, value in daemon.metrics().items():
                total[name] = total.get(name, 0) + value
        return total

    before = both()
    _traffic(pair)
    return before, both(), pair[0].scrape()


def families(text):
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def test_every_family_moves(moved):
    before, after, text = moved
    still = []
    for family, kind in families(text).items():
        samples = [name for name in after if re.match(rf"{family}(_count|_sum)?(\{{|$)", name)]
        assert samples or family in ELSEWHERE, f"{family} has no sample"
        if family not in ELSEWHERE and kind != "gauge" and all(after[n] == before.get(n, 0) for n in samples):
            still.append(family)
    assert not still, f"these did not move: {still}"


def test_every_stage_and_tier_moves(moved):
    before, after, _ = moved
    for stage in ("queue", "scan", "plan", "encode", "send", "receive", "decode", "commit"):
        name = f'spectrumkv_stage_duration_seconds_count{{stage="{stage}"}}'
        assert grown(before, after, name) > 0, name
    for role in ("sender", "receiver"):
        for tier in TIERS:
            assert grown(before, after, f'spectrumkv_tokens_total{{role="{role}",tier="{tier}"}}') > 0
    assert grown(before, after, "spectrumkv_time_to_first_token_seconds_count") == len(TIERS)
    assert grown(before, after, 'spectrumkv_transfers_total{role="receiver",outcome="expired"}') == 1
    assert grown(before, after, "spectrumkv_nonfinite_values_total") >= 1
    assert grown(before, after, 'spectrumkv_leases_expired_total{kind="pool"}') == 1


def test_reconstruction_error_is_sampled(moved):
    """Every tier, by its sender; fewer bits lose more."""
    before, after, _ = moved
    mean = {}
    for tier in TIERS:
        name = "spectrumkv_reconstruction_error_ratio"
        count = grown(before, after, f'{name}_count{{tier="{tier}"}}')
        assert count >= 4, tier  # two layers, K and V
        mean[tier] = grown(before, after, f'{name}_sum{{tier="{tier}"}}') / count
    assert mean["RAW"] == 0
    assert 0 < mean["P8"] < mean["P4"] and 0 < mean["Q8"] < mean["Q4"] < mean["Q3"] < mean["Q2"] < 0.6, mean


@pytest.mark.parametrize("chunks", [0, 1])
def test_reconstruction_error_of_no_chunk_or_of_all(chunks, target, decode):
    """The share is configured, and none are measured where it is 0."""
    with running(metrics__reconstruction_sample_chunks=chunks) as here, here.client() as source:
        a, b, _ = big_sides(here, decode, source, target, tokens=300, layers=3)
        with a.pool, b.pool:
            policy = skv.policy(allocator="UNIFORM", uniform_tier="P8", tiers=TIERS, budget=0.6, sinks=0)
            move(unique("share"), source, target, here, decode, a, b, 300, policy=policy)
        counts = [value for name, value in here.metrics().items() if "reconstruction_error_ratio_count" in name]
        assert sum(counts) == chunks * 3 * 2  # K and V of one chunk for each layer


def test_no_label_comes_from_a_request(moved):
    _, after, _ = moved
    closed = re.compile(r"^[a-zA-Z0-9_.:+() -]*$")
    for name in after:
        for value in re.findall(r'="([^"]*)"', name):
            assert closed.match(value) and not re.search(r"tier-|big-|lost-|127\.0\.0\.1", value), name


def test_inflight_and_blocks_follow_a_transfer(pair):
    here, there, source, target = pair
    group = small_group()
    b = make_side(target, there, [group], {0: [1, 2, 3]})
    with b.pool:
        quiet = there.metrics()

        def comes(name, value):  # gauges are refreshed now and then
            end = time.monotonic() + 5
            while grown(quiet, there.metrics(), name) != value:
                assert time.monotonic() < end, name
                time.sleep(0.05)

        name = unique("waits")
        target.expect(name, pool=b.pool, token_count=10, blocks=b.blocks)
        comes("spectrumkv_inflight_transfers", 1)
        comes('spectrumkv_pool_blocks{state="receiving"}', 3)
        target.cancel(name)
        comes("spectrumkv_inflight_transfers", 0)
        comes('spectrumkv_pool_blocks{state="receiving"}', 0)


def test_a_restart_shows_in_the_start_time():
    before = time.time()
    with running() as daemon:
        first = daemon.metrics()["process_start_time_seconds"]
        assert before - 1 <= first <= time.time()
        daemon.restart()
        assert first < daemon.metrics()["process_start_time_seconds"] <= time.time()
