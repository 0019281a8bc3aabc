"""What an operator configures (kv_connector_extra_config) and what a proxy asks of one request (kv_transfer_params)."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from spectrumkv.policies import policy as make_policy
from spectrumkv.v1 import policy_pb2

_POLICY_KEYS = frozenset({
    "budget", "target_seconds", "min_budget", "allocator", "tiers", "uniform_tier", "random_seed", "importance",
    "decay_lambda", "sinks", "strict_budget", "override_quality_gate",
})  # fmt: skip
_TOKEN_BYTES = 16
# What a cache may be refined to; "" not at all.
_FINAL_TIERS = ("", "RAW", "Q8")
# What the daemon takes as an id has up to 128 characters; the last 16 are for what is appended: ".tp7", and ".refine-3" to that.
_TRANSFER_ID = re.compile(r"[A-Za-z0-9._:-]{1,112}", re.ASCII)
_MOST_MS = 86_400_000  # a day: no daemon allows a longer deadline
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Settings:
    """kv_connector_extra_config.

    daemon: path of the daemon's worker socket, or "host:port" on loopback (then with token_file).
    peer_address: "host:port" by which other daemons reach this one; a prefill worker whose KV is pulled says it in its
        answer. Not needed for push.
    model, revision: compared by the two daemons; empty: what vLLM serves it as, and nothing.
    policy: arguments of spectrumkv.policy; what is not given is the daemon's default.
    deadline_ms: how long a transfer may take; 0: the daemon's default.
    shared_dir: the daemon's memory.shared_dir as this process sees it, instead of /dev/shm.
    recent_queries: give the daemon the last queries of the prompt, where they can be captured.
    idle_wait_ms: vLLM asks without a pause whether a transfer has ended while it has nothing else to do; it is answered at
        the latest after so long.
    refine: a tier, "RAW" or "Q8": what has arrived coarse becomes so good between the steps of decode. To be set on both sides;
        "": not at all. The other settings of refinement mean nothing without it. A request's policy may ask for another.
    retain_seconds: for how long a prefill worker keeps what it has sent, at most.
    retain_in: where: "blocks", those of vLLM's cache, or "daemon", which takes a copy.
    retain_share: of the cache's blocks, how many may be kept so at a time. What is sent beyond is not refined.
    refine_step_bytes: how much a decode worker writes into its cache before a step, at most, but at least a chunk (1 MiB).
    """

    daemon: str = "/run/spectrumkv/worker.sock"
    token_file: str = ""
    peer_address: str = ""
    model: str = ""
    revision: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    deadline_ms: int = 0
    shared_dir: str = ""
    recent_queries: bool = True
    idle_wait_ms: float = 2.0
    refine: str = ""
    retain_seconds: float = 30.0
    retain_in: str = "blocks"
    retain_share: float = 0.25
    refine_step_bytes: int = 16 << 20

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises ValueError for a key that does not exist, a value of another type, a policy that cannot be."""
        known = {one.name: one for one in fields(cls)}
        for key, value in extra.items():
            if key not in known:
                raise ValueError(f"kv_connector_extra_config: {key!r} is none of {', '.join(known)}")
            default = cls.__dataclass_fields__[key].default
            wanted: Any = Mapping if key == "policy" else (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
                raise ValueError(f"kv_connector_extra_config: {key} cannot be {value!r}")
        out = cls(**extra)
        policy_of(out.policy, {})
        out._check_values()
        return out

    def _check_values(self) -> None:
        """What would be refused only when the first request uses it, between two steps of the engine, is refused here."""
        for key, right in (
            ("deadline_ms", 0 <= self.deadline_ms <= _MOST_MS), ("idle_wait_ms", 0 <= self.idle_wait_ms <= _MOST_MS),
            ("refine", self.refine in _FINAL_TIERS), ("retain_seconds", 0 < self.retain_seconds < math.inf),
            ("retain_in", self.retain_in in ("blocks", "daemon")), ("retain_share", 0 < self.retain_share <= 1),
            ("refine_step_bytes", 0 < self.refine_step_bytes <= _MOST_BYTES),
        ):  # fmt: skip
            if not right:
                raise ValueError(f"kv_connector_extra_config: {key} cannot be {getattr(self, key)!r}")


def retaining(policy: policy_pb2.Policy | None, settings: Settings, tier: str) -> policy_pb2.Policy:
    """The policy, with the source kept and refined to this tier in the background."""
    out = policy_pb2.Policy() if policy is None else policy
    out.MergeFrom(make_policy(retain_seconds=settings.retain_seconds, refine=tier))
    return out


def policy_of(configured: Mapping[str, Any], asked: Mapping[str, Any]) -> policy_pb2.Policy | None:
    """The policy of a request: what it asks for over what is configured. None where neither says anything.

    Raises ValueError.
    """
    merged = {**configured, **asked}
    if "budget" in asked:  # a request that fixes its budget does not keep the configured automatic one
        for key in ("target_seconds", "min_budget"):
            if key not in asked:
                merged.pop(key, None)
    unknown = sorted(set(merged) - _POLICY_KEYS)
    if unknown:
        raise ValueError(f"policy: {', '.join(unknown)} is none of {', '.join(sorted(_POLICY_KEYS))}")
    try:
        return make_policy(**merged) if merged else None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"policy: {error}") from None


@dataclass(frozen=True)
class Handover:
    """One request's kv_transfer_params.

    sends: this worker computes the prompt and hands its KV on; otherwise it receives.
    pushed: both requests were sent at once, and the sender goes to decode_peer; otherwise the KV is held until the other
        fetches it from prefill_peer.
    arrived_s: when the client's request came (seconds since 1970), for the time to first token; 0: when ours did.
    refine: over the configured tier, given as the policy's; None: that one.
    """

    sends: bool
    pushed: bool
    transfer_id: str
    token: bytes
    decode_peer: str
    prefill_peer: str
    policy: Mapping[str, Any]
    arrived_s: float
    refine: str | None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Handover | None:
        """None where the request has nothing to do with another worker. Raises ValueError where what it asks cannot be."""
        params = {} if params is None else _mapping(params, "kv_transfer_params")
        sends, receives = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
        if not sends and not receives:
            return None
        if sends and receives:
            raise ValueError("do_remote_decode and do_remote_prefill: a request is one half of a transfer")
        decode_peer, prefill_peer = _peer(params, "decode_peer"), _peer(params, "prefill_peer")
        transfer_id = _text(params, "transfer_id")
        if not transfer_id:
            if decode_peer or receives:
                raise ValueError("transfer_id is missing: both halves name it")
            transfer_id = f"kv-{secrets.token_hex(_TOKEN_BYTES)}"
        if not _TRANSFER_ID.fullmatch(transfer_id):
            raise ValueError(f"transfer_id must be 1 to 112 of A-Z a-z 0-9 . _ : -, not {transfer_id[:200]!r}")
        if receives and not decode_peer and not prefill_peer:
            raise ValueError("neither decode_peer nor prefill_peer is given")
        asked = params.get("policy")
        policy = {} if asked is None else dict(_mapping(asked, "policy"))
        refine = policy.pop("refine", None)
        if refine not in (None, *_FINAL_TIERS):
            raise ValueError(f"policy: refine cannot be {refine!r}")
        return cls(
            sends=sends, pushed=bool(decode_peer), transfer_id=transfer_id, token=_token(params, sends and not decode_peer),
            decode_peer=decode_peer, prefill_peer=prefill_peer, policy=policy,
            arrived_s=_moment(params, "arrived_s"), refine=refine,
        )  # fmt: skip

    def answer(self, peer_address: str) -> dict[str, Any]:
        """kv_transfer_params of the prefill's answer: what the decode request is to be sent with."""
        out: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": self.transfer_id}
        if self.token:
            out["transfer_token"] = self.token.hex()
        if self.pushed:
            out["decode_peer"] = self.decode_peer
        else:
            out["prefill_peer"] = peer_address
        return out


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping, not {value!r}")
    return value


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return bool(value)


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, not {value!r}")
    return value


def _peer(params: Mapping[str, Any], key: str) -> str:
    value = _text(params, key)
    if not value.isascii() or not value.isprintable():  # JSON has strings that no message can
        raise ValueError(f"{key} must be host:port, not {value!r}")
    return value


def _moment(params: Mapping[str, Any], key: str) -> float:
    value = params.get(key)
    if value is None:
        return 0.0
    # Compared, not converted: an integer of JSON may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise ValueError(f"{key} must be seconds since 1970, not {str(value)[:200]}")
    return float(value)


def _token(params: Mapping[str, Any], make: bool) -> bytes:
    text = _text(params, "transfer_token")
    if not text:
        return secrets.token_bytes(_TOKEN_BYTES) if make else b""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != _TOKEN_BYTES:
        raise ValueError(f"transfer_token must be {2 * _TOKEN_BYTES} hexadecimal digits")
    return token
