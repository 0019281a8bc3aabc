"""The quality gate: probes through a real daemon, what they open, and what is refused until then."""

import contextlib
import os
import pathlib

import numpy as np
import pytest
from authority import Ca
from probe_model import BLOCK_TOKENS, DIM, TextInKv
from real_daemon import RealDaemon, refused, running

import spectrumkv as skv
from spectrumkv.v1 import policy_pb2, probe_service_pb2, report_pb2, worker_service_pb2

BLOCKS = 32  # of each side: 2048 tokens
HERE, THERE = list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
GROUP = dict(layers=[0, 1], heads=1, head_dim=DIM, block_tokens=BLOCK_TOKENS, num_blocks=2 * BLOCKS)


def pool_of(client, *, model="llama", revision="r1"):
    return client.shared_memory_pool([skv.Group(**GROUP)], model=model, revision=revision)


def probe(client, pool, tiers, *, robust=True, **options):
    return skv.run_probe(client, pool, TextInKv(robust), tiers=tiers, blocks=HERE, into=THERE, prompt_characters=1500,
                         **{"seed": 11, **options})  # fmt: skip


def tier(name):
    return policy_pb2.Tier.Value(f"TIER_{name}")


def opened(verdicts):
    return {skv.tier_name(verdict.tier): verdict.open for verdict in verdicts}


def send(client, pool, name, **policy):
    """A round trip of 500 tokens; the sender's report."""
    kv = TextInKv(True).prefill("some words of no importance, " * 18)
    return skv.round_trip(client, name, pool, kv, HERE, THERE, skv.policy(**policy))


@pytest.fixture(params=["warn", "enforce"])
def gate(request):
    return request.param


@pytest.fixture
def verdicts_file(tmp_path):
    return tmp_path / "verdicts"


def test_self_is_this_daemon_whoever_may_be_dialled():
    with running(peer__allowed_hosts="10.9.9.9") as daemon, daemon.client() as client, pool_of(client) as pool:
        kv = np.random.default_rng(1).standard_normal((2, 2, 700, 1, DIM)).astype(np.float16)
        back, report = skv.round_trip(client, "there-and-back", pool, kv, HERE, THERE, skv.policy(allocator="RAW", budget=1.1))
        assert (back.view("<u2") == kv.view("<u2")).all()
        assert report.tokens == 700 and report.saved_bytes == 0
        coded, _ = skv.round_trip(client, "coded", pool, kv, HERE, THERE, skv.policy(budget=0.3))
        assert 0 < np.abs(coded.astype(float) - kv).max() < 3
        with refused("PERMISSION_DENIED", "PEER_NOT_ALLOWED"):
            client.send("not-so", peer=daemon.peer, pool=pool, token_count=10, blocks=HERE)
        with refused("INVALID_ARGUMENT", "INVALID_PEER"):
            client.send("nor-so", peer="Self", pool=pool, token_count=10, blocks=HERE)
        plan = client.plan(pool, 100, HERE, peer="self")
        assert plan.kv_bytes > 0


def test_self_with_certificates(tmp_path):
    with running(**Ca(tmp_path).issue("here", 20), peer__listen_address="0.0.0.0:0") as daemon, daemon.client() as client, pool_of(client) as pool:
        assert send(client, pool, "over-tls", allocator="RAW")[1].state == report_pb2.TRANSFER_STATE_COMMITTED


def test_a_probe_opens_what_the_model_bears(gate, verdicts_file):
    with running(quality__gate=gate, quality__verdicts_file=verdicts_file) as daemon, daemon.client() as client:
        with pool_of(client) as pool, pool_of(client, model="frail") as frail:
            verdicts = probe(client, pool, ["Q4", "Q2"])
            assert opened(verdicts) == {"Q4": True, "Q2": True}
            for verdict in verdicts:
                assert (verdict.model, verdict.revision, verdict.codec_version) == ("llama", "r1", 1)
                assert [(s.passed, s.trials) for s in verdict.scores] == [(3, 3)] * 3
                assert verdict.unix_seconds > 1.6e9 and not verdict.shared
            assert opened(probe(client, frail, ["Q8", "Q2"], robust=False)) == {"Q8": True, "Q2": False}
        assert opened(client.verdicts("llama")) == {"Q4": True, "Q2": True}
        assert len(client.verdicts()) == 4
        metrics = daemon.metrics()
        assert metrics['spectrumkv_gate_verdicts{tier="Q2",verdict="open"}'] == 1
        assert metrics['spectrumkv_gate_verdicts{tier="Q2",verdict="closed"}'] == 1
        assert metrics['spectrumkv_probe_trials_total{kind="needle",result="passed"}'] >= 9
        assert metrics['spectrumkv_probe_trials_total{kind="code",result="failed"}'] >= 2


def test_verdicts_outlive_the_daemon_and_not_the_revision(verdicts_file):
    with running(quality__gate="enforce", quality__verdicts_file=verdicts_file) as daemon:
        with daemon.client() as client, pool_of(client) as pool:
            probe(client, pool, ["Q4"])
            assert send(client, pool, "open", tiers=["RAW", "Q4"], budget=0.4)[1].gate_action == 0
        daemon.restart()
        with daemon.client() as client, pool_of(client) as pool, pool_of(client, revision="r2") as newer:
            assert opened(client.verdicts("llama")) == {"Q4": True}
            assert send(client, pool, "open", tiers=["RAW", "Q4"], budget=0.4)[1].gate_action == 0
            with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED", gate="quality.gate", tiers="Q4"):
                send(client, newer, "newer", tiers=["RAW", "Q4"], budget=0.4)
            assert client.delete_verdicts("llama", "r2") == 0
            assert client.delete_verdicts("llama") == 1
            with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED"):
                send(client, pool, "closed", tiers=["RAW", "Q4"], budget=0.4)
        daemon.restart()
        with daemon.client() as client:
            assert not client.verdicts()
    assert oct(os.stat(verdicts_file).st_mode & 0o777) == "0o600"


def test_without_a_file_they_are_forgotten():
    with running(quality__gate="enforce") as daemon:
        with daemon.client() as client, pool_of(client) as pool:
            probe(client, pool, ["Q4"])
        daemon.restart()
        with daemon.client() as client:
            assert not client.verdicts()


def test_enforce_narrows_defaults_refuses_names_and_can_be_overridden():
    with running(quality__gate="enforce") as daemon, daemon.client() as client, pool_of(client) as pool:
        _, report = send(client, pool, "default")
        assert report.gate_action == report_pb2.GATE_ACTION_NARROWED
        assert [skv.tier_name(t) for t in report.closed_tiers] == ["Q4", "Q3", "Q2"]
        assert {skv.tier_name(t.tier) for t in report.tiers} <= {"RAW", "Q8"}
        with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED", gate="quality.gate", tiers="Q4, Q3, Q2"):
            send(client, pool, "small", budget=0.3)  # a hard budget that RAW and Q8 cannot meet
        with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED", tiers="P4"):
            send(client, pool, "uniform", allocator="UNIFORM", uniform_tier="P4")
        with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED", tiers="P4"):
            client.plan(pool, 100, HERE, skv.policy(allocator="UNIFORM", uniform_tier="P4"))
        plan = client.plan(pool, 100, HERE)
        assert plan.gate_action == report_pb2.GATE_ACTION_NARROWED and len(plan.closed_tiers) == 3
        _, report = send(client, pool, "over", tiers=["RAW", "Q4"], budget=0.4, override_quality_gate=True)
        assert report.gate_action == report_pb2.GATE_ACTION_OVERRIDDEN
        assert [skv.tier_name(t) for t in report.closed_tiers] == ["Q4"]
        assert "Q4" in {skv.tier_name(t.tier) for t in report.tiers}
        for harmless in (dict(allocator="RAW"), dict(allocator="UNIFORM", uniform_tier="Q8"),
                         dict(allocator="TWO_TIER", tiers=["RAW", "Q8", "Q2"], budget=0.8)):  # fmt: skip
            assert send(client, pool, f"fine-{harmless['allocator']}", **harmless)[1].gate_action == 0
        counted = {d: daemon.metrics()[f'spectrumkv_gate_decisions_total{{decision="{d}"}}']
                   for d in ("open", "warned", "overridden", "narrowed", "refused")}  # fmt: skip
        assert counted == {"open": 3, "warned": 0, "overridden": 1, "narrowed": 1, "refused": 2}


def test_by_default_the_gate_warns_and_off_it_says_nothing():
    for mode, action in ((None, report_pb2.GATE_ACTION_WARNED), ("off", 0)):
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(running(**({"quality__gate": mode} if mode else {})))
            client = stack.enter_context(daemon.client())
            pool = stack.enter_context(pool_of(client))
            _, report = send(client, pool, "default", budget=0.4)
            assert report.gate_action == action
            assert len(report.closed_tiers) == (3 if action else 0)
            assert daemon.metrics()['spectrumkv_gate_decisions_total{decision="warned"}'] == (1 if action else 0)


@pytest.fixture
def started(source, prefill):
    """(client, pool, a probe at Q4, a function that sends a trial and makes its result)."""
    with pool_of(source, model=f"probed-{os.urandom(3).hex()}") as pool:
        answer = pool.call(source.probes.StartProbe, probe_service_pb2.StartProbeRequest(tiers=[tier("Q4")], prompt_characters=1500))

        def result(trial, name="", sent="Q4", pool=pool):
            name = name or f"{answer.probe_id}-{trial.trial_id}-{sent}"
            kv = TextInKv(True).prefill(trial.prompt)
            policy = skv.policy(allocator="UNIFORM", uniform_tier=sent, override_quality_gate=True)
            landed, _ = skv.round_trip(source, name, pool, kv, HERE, THERE, policy, peer=answer.peer)
            out = probe_service_pb2.TrialResult(trial_id=trial.trial_id, tier=tier("Q4"), transfer_id=name)
            if trial.kind == probe_service_pb2.TRIAL_KIND_NEEDLE:
                out.answer = TextInKv(True).answer(landed, trial.suffix, trial.answer_characters)
            else:
                out.agreement.positions = out.agreement.agreed = len(trial.suffix)
            return out

        yield source, pool, answer, result


def test_trials_are_what_the_daemon_says(started):
    _, _, answer, _ = started
    kinds = [trial.kind for trial in answer.trials]
    assert kinds == [kind for kind in (1, 2, 3) for _ in range(3)]
    assert (answer.peer, answer.trials_needed, answer.codec_version) == ("self", 2, 1)
    assert answer.seed and 0 < answer.expires_in_ms <= 3_600_000
    for trial in answer.trials:
        assert 1490 <= len(trial.prompt) <= 1900 and trial.suffix
        assert (trial.answer_characters > 0) == (trial.kind == probe_service_pb2.TRIAL_KIND_NEEDLE)


def test_a_trial_must_have_gone_through_the_codec(started):
    """The daemon looks at the transfers that a report names: it does not take the worker's word."""
    client, pool, answer, result = started
    good = [result(trial) for trial in answer.trials]

    def report(change):
        results = [probe_service_pb2.TrialResult.FromString(r.SerializeToString()) for r in good]
        change(results)
        return client.report_trials(answer.probe_id, results)

    raw = result(answer.trials[0], sent="Q8").transfer_id
    with refused("FAILED_PRECONDITION", "NOT_A_TRIAL", transfer_id=raw):
        report(lambda r: setattr(r[0], "transfer_id", raw))
    with pool_of(client, model="other") as other:
        elsewhere = result(answer.trials[0], name=f"{answer.probe_id}-elsewhere", pool=other).transfer_id
        with refused("FAILED_PRECONDITION", "NOT_A_TRIAL", transfer_id=elsewhere):
            report(lambda r: setattr(r[0], "transfer_id", elsewhere))
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        report(lambda r: setattr(r[0], "transfer_id", "never-sent"))
    client.expect("half", pool=pool, token_count=10, blocks=THERE)
    with refused("NOT_FOUND", "UNKNOWN_TRANSFER"):
        report(lambda r: setattr(r[0], "transfer_id", "half"))
    client.cancel("half")
    with refused("INVALID_ARGUMENT", "INVALID_TRIAL"):
        report(lambda r: setattr(r[1], "transfer_id", r[0].transfer_id))
    with refused("INVALID_ARGUMENT", "INVALID_TRIAL"):
        report(lambda r: setattr(r[0].agreement, "positions", 100))  # of a needle
    with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        report(lambda r: setattr(r[8].agreement, "positions", 1))
    with refused("UNIMPLEMENTED", "UNKNOWN_TIER"):
        report(lambda r: setattr(r[0], "tier", 99))
    assert client.report_trials(answer.probe_id, good[:4]) == []
    with refused("INVALID_ARGUMENT", "INVALID_TRIAL"):
        report(lambda r: None)  # the first four again
    assert opened(client.report_trials(answer.probe_id, good[4:])) == {"Q4": True}
    with refused("NOT_FOUND", "UNKNOWN_PROBE"):
        report(lambda r: None)


def test_wrong_answers_close(started):
    client, _, answer, result = started
    results = [result(trial) for trial in answer.trials]
    for at in (0, 1):
        results[at].answer = "12345"
    (verdict,) = client.report_trials(answer.probe_id, results)
    assert not verdict.open
    assert [(s.passed, s.trials) for s in verdict.scores] == [(1, 3), (3, 3), (3, 3)]


def test_what_may_not_be_probed(source):
    def start(pool, **fields):
        return pool.call(source.probes.StartProbe, probe_service_pb2.StartProbeRequest(**fields))

    with pool_of(source, revision="") as nameless, pool_of(source) as pool:
        with refused("INVALID_ARGUMENT", "NO_REVISION"):
            start(nameless, tiers=[tier("Q4")])
        for tiers, code, reason in (([], "INVALID_ARGUMENT", "INVALID_TIERS"), ([tier("RAW")], "INVALID_ARGUMENT", "INVALID_TIERS"),
                                    ([tier("DROP")], "INVALID_ARGUMENT", "INVALID_TIERS"), ([0], "INVALID_ARGUMENT", "INVALID_TIERS"),
                                    ([tier("Q4")] * 2, "INVALID_ARGUMENT", "INVALID_TIERS"),
                                    ([tier("Q4")] * 9, "INVALID_ARGUMENT", "INVALID_TIERS"), ([77], "UNIMPLEMENTED", "UNKNOWN_TIER")):  # fmt: skip
            with refused(code, reason):
                start(pool, tiers=tiers)
        for characters in (1499, 100_001):
            with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
                start(pool, tiers=[tier("Q4")], prompt_characters=characters)
        stale = worker_service_pb2.UnregisterPoolRequest(pool=pool.ref).pool
        stale.epoch ^= 1
        with refused("FAILED_PRECONDITION", "STALE_EPOCH"):
            source.probes.StartProbe(probe_service_pb2.StartProbeRequest(pool=stale, tiers=[tier("Q4")]))
        with refused("INVALID_ARGUMENT", "INVALID_MODEL"):
            source.delete_verdicts("")
        with refused("INVALID_ARGUMENT", "OUT_OF_RANGE"):
            source.verdicts("m" * 300)
        probes = [start(pool, tiers=[tier("Q4")]).probe_id for _ in range(9)]
        for probe_id, reason in ((probes[0], "UNKNOWN_PROBE"), (probes[1], "INVALID_TRIAL")):  # the oldest made room
            with pytest.raises(skv.SpectrumKVError) as error:
                source.report_trials(probe_id, [])
            assert error.value.reason == reason


@pytest.mark.parametrize("damage", ["cut", "byte", "mode", "folder"])
def test_a_file_that_cannot_be_trusted_stops_the_start(verdicts_file, damage):
    with running(quality__verdicts_file=verdicts_file) as daemon, daemon.client() as client, pool_of(client) as pool:
        probe(client, pool, ["Q4"])
    text = verdicts_file.read_bytes()
    if damage == "cut":
        verdicts_file.write_bytes(text[:-3])
    elif damage == "byte":
        verdicts_file.write_bytes(text.replace(b"open", b"oqen"))
    elif damage == "mode":
        verdicts_file.chmod(0o666)
    else:
        verdicts_file = pathlib.Path(f"{verdicts_file}/below")
    with pytest.raises(RuntimeError, match="VERDICTS_FILE"):
        RealDaemon(quality__verdicts_file=verdicts_file)


def test_a_verdict_that_cannot_be_kept_is_none(verdicts_file):
    with running(quality__gate="enforce", quality__verdicts_file=verdicts_file) as daemon, daemon.client() as client:
        pathlib.Path(f"{verdicts_file}.new").mkdir()
        with pool_of(client) as pool:
            with refused("UNAVAILABLE", "VERDICTS_NOT_WRITTEN"):
                probe(client, pool, ["Q4"])
            assert not client.verdicts()
            with refused("FAILED_PRECONDITION", "QUALITY_GATE_CLOSED"):
                send(client, pool, "closed", tiers=["RAW", "Q4"], budget=0.4)
