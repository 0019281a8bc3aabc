"""What the vLLM connector takes from its configuration and from a request."""

import pytest

from spectrumkv.vllm import settings
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


SEND = {"do_remote_decode": True}
RECEIVE = {"do_remote_prefill": True, "transfer_id": "t", "decode_peer": "h:1"}
NUMBERS = [[1], {"a": 1}, "1", True, float("nan"), float("inf"), -1, 10**400, -(10**400)]
NO_TEXT = [1, True, False, 0, [], ["x"], {"a": 1}, {}, 1.5]
UNSAYABLE = ["\ud800", "h\n:1", "\u0000", "\u00e9:1"]


@pytest.mark.parametrize("half", [SEND, RECEIVE], ids=["send", "receive"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("arrived_s", value) for value in NUMBERS]
    + [(key, value) for key in ("transfer_id", "transfer_token", "decode_peer", "prefill_peer") for value in [*NO_TEXT, *UNSAYABLE]]
    + [("policy", value) for value in ("", "x", 0, 0.3, [], [1], False)]
    + [("transfer_id", value) for value in ("a b", "a/b", "\u00e9", "x" * 113, "t\n")],
)  # fmt: skip
def test_fields_of_a_request_that_cannot_be(half, key, value):
    """Whatever JSON holds, it is a ValueError and nothing else: on_new_request runs in the engine's loop."""
    with pytest.raises(ValueError, match=key):
        Handover.of({**half, key: value})


@pytest.mark.parametrize("key", ["do_remote_decode", "do_remote_prefill"])
@pytest.mark.parametrize("value", ["true", 1, [True], {}, 0.0])
def test_halves_are_true_or_false(key, value):
    with pytest.raises(ValueError, match=key):
        Handover.of({key: value, "transfer_id": "t", "decode_peer": "h:1"})


@pytest.mark.parametrize("params", [[], "x", 1, ["do_remote_decode"]])
def test_parameters_are_a_mapping(params):
    with pytest.raises(ValueError, match="kv_transfer_params"):
        Handover.of(params)


JSON = [None, True, 0, -1, 1.5, 10**400, float("nan"), "", "x", "\ud800", [], [1], ["x"], [None], {}, {"a": 1}]


@pytest.mark.parametrize("key", sorted(settings._POLICY_KEYS | {"refine"}))
def test_a_policy_of_any_json_is_made_or_refused(key):
    for value in JSON:
        try:
            handover = Handover.of({**SEND, "policy": {key: value}})
            policy_of({}, handover.policy)
        except ValueError:
            pass


def test_absent_and_null_are_the_same():
    keys = ("arrived_s", "transfer_token", "prefill_peer", "policy", "do_remote_decode")
    assert Handover.of({**RECEIVE, **dict.fromkeys(keys)}) == Handover.of(RECEIVE)


def test_an_id_leaves_room_for_what_is_appended():
    """128 is the daemon's limit; a rank's part may be refined."""
    longest = "x" * 112
    assert Handover.of({**SEND, "transfer_id": longest}).transfer_id == longest
    assert len(part_name(longest, 99, 100) + ".refine-99") <= 128


@pytest.mark.parametrize(
    ("key", "values"),
    {
        "deadline_ms": [-1, 1 << 64, 1.5, None, [1]], "idle_wait_ms": [-1, float("nan"), float("inf"), 10**400, "2"],
        "retain_seconds": [0, -1, float("nan"), float("inf"), "1"], "retain_share": [0, 1.5, float("nan")],
        "refine_step_bytes": [0, -1, 1 << 64, True], "policy": [[], "x", 1], "daemon": [1, None, []], "refine": ["Q4", 1],
        "recent_queries": [0, "yes"], "shared_dir": [1], "retain_in": ["x", 1],
    }.items(),
)  # fmt: skip
def test_settings_out_of_their_range(key, values):
    for value in values:
        with pytest.raises(ValueError, match=key):
            Settings.of({key: value})
