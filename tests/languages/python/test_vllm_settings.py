"""What the vLLM connector takes from its configuration and from a request."""

import pytest

from spectrumkv.vllm.settings import Handover, Settings, policy_of
from spectrumkv.vllm.steps import part_name


@pytest.mark.parametrize(
    "extra", [{"deamon": "x"}, {"deadline_ms": "30"}, {"policy": {"tiers": 5}}, {"policy": {"budget": "half"}}, {"recent_queries": 1}]
)
def test_settings_that_cannot_be(extra):
    with pytest.raises(ValueError):
        Settings.of(extra)


def test_asked_budget_replaces_an_automatic_one():
    made = policy_of({"budget": "auto", "target_seconds": 0.5}, {"budget": 0.3})
    assert made.budget == pytest.approx(0.3) and not made.HasField("auto_budget")
    assert policy_of({}, {}) is None


def test_handover_of_requests_without_one():
    assert Handover.of(None) is None and Handover.of({}) is None and Handover.of({"other": 1}) is None


def test_every_setting_in_its_place():
    made = Settings.of({"daemon": "/s", "peer_address": "h:1", "model": "m", "revision": "r", "deadline_ms": 5, "idle_wait_ms": 1,
                        "policy": {"budget": 0.3, "tiers": ["RAW", "Q8"]}, "recent_queries": False, "shared_dir": "/d"})  # fmt: skip
    assert (made.daemon, made.deadline_ms, made.idle_wait_ms, made.recent_queries) == ("/s", 5, 1, False)
    assert list(policy_of(made.policy, {"sinks": 2}).tiers) == list(policy_of({"tiers": ["RAW", "Q8"]}, {}).tiers)


def test_halves_of_a_push_and_what_the_answer_tells():
    both = {"transfer_id": "t", "transfer_token": "0f" * 16, "decode_peer": "d:1", "prefill_peer": "p:1"}
    sender = Handover.of({**both, "do_remote_decode": True})
    receiver = Handover.of({**both, "do_remote_prefill": True, "arrived_s": 12.5})
    assert sender.sends and sender.pushed and not receiver.sends and receiver.pushed
    assert sender.token == receiver.token == bytes([15] * 16) and receiver.arrived_s == 12.5
    told = sender.answer("unused:1")
    assert Handover.of(told).transfer_id == "t" and Handover.of(told).pushed


def test_a_pull_makes_its_own_name_and_token():
    first, second = (Handover.of({"do_remote_decode": True}) for _ in range(2))
    assert first.transfer_id != second.transfer_id and first.token != second.token and len(first.token) == 16
    told = Handover.of(first.answer("p:1"))
    assert (told.prefill_peer, told.pushed, told.token) == ("p:1", False, first.token)


def test_ranks_have_transfers_of_their_own():
    assert [part_name("t", rank, 2) for rank in range(2)] == ["t.tp0", "t.tp1"] and part_name("t", 0, 1) == "t"
