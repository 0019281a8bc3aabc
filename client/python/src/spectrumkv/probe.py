"""Probes: shows the daemon that a model bears a tier, by trials that the daemon hands out (its quality gate)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spectrumkv.client import Client
from spectrumkv.errors import SpectrumKVError
from spectrumkv.policies import policy
from spectrumkv.pools import SharedMemoryPool
from spectrumkv.v1 import policy_pb2, probe_service_pb2, report_pb2


class ProbeModel(Protocol):
    """What a probe asks of a model. `kv` is [layers, planes, tokens, heads, head_dim], as the pool has it; every call works on
    the KV it is given, and on what it computes itself for the text."""

    def prefill(self, text: str) -> NDArray[Any]:
        """The KV of a prompt."""

    def answer(self, kv: NDArray[Any], text: str, characters: int) -> str:
        """What the model writes after the prompt whose KV this is, and `text`: greedily, at least so many characters."""

    def next_tokens(self, kv: NDArray[Any], text: str) -> Sequence[int]:
        """The most likely next token after each token of `text`, which follows the prompt whose KV this is."""


@dataclass
class _Prompt:
    trial: Any
    kv: NDArray[Any]
    exact: Sequence[int]


def round_trip(
    client: Client, transfer_id: str, pool: SharedMemoryPool, kv: NDArray[Any], blocks: Sequence[int],
    into: Sequence[int], policy: policy_pb2.Policy, *, peer: str = "self", timeout_s: float = 60.0,
) -> tuple[NDArray[Any], report_pb2.TransferReport]:  # fmt: skip
    """What becomes of `kv` when the daemon codes and decodes it, and the sender's report. No other daemon is needed.

    Overwrites `blocks`, which the KV is sent from, and `into`, where it lands. The policy must not drop tokens.
    """
    tokens = kv.shape[2]
    pool.write_tokens(kv, blocks)
    client.expect(transfer_id, pool=pool, token_count=tokens, blocks=into)
    try:
        client.send(transfer_id, peer=peer, pool=pool, token_count=tokens, blocks=blocks, policy=policy)
        client.wait(transfer_id, role="RECEIVER", timeout_s=timeout_s)
    except BaseException:
        # The reserved blocks are free again, whatever the first half came to.
        with contextlib.suppress(SpectrumKVError):
            client.cancel(transfer_id, role="RECEIVER")
        raise
    return pool.read_tokens(tokens, into), client.wait(transfer_id, role="SENDER", timeout_s=timeout_s)


def run_probe(
    client: Client, pool: SharedMemoryPool, model: ProbeModel, *, tiers: Sequence[str], blocks: Sequence[int],
    into: Sequence[int], prompt_characters: int = 0, seed: int = 0, on_progress: Callable[[str], None] | None = None,
) -> list[probe_service_pb2.Verdict]:  # fmt: skip
    """Runs a probe of the pool's model at `tiers` to its verdicts, which hold from then on.

    The pool was made with the model's name and revision. blocks, into: two sets of its blocks that nothing else uses now, each
    with room for the longest prompt. prompt_characters: about how long prompts are; 0: the daemon's default. seed: trials that
    can be repeated; 0: new ones. Raises SpectrumKVError, and TransferFailed.
    """
    request = probe_service_pb2.StartProbeRequest(
        tiers=[policy_pb2.Tier.Value(f"TIER_{tier}") for tier in tiers], prompt_characters=prompt_characters, seed=seed
    )
    probe = pool.call(client.probes.StartProbe, request)
    verdicts: list[probe_service_pb2.Verdict] = []
    for trial in probe.trials:
        prompt = _prefill(model, trial)
        for tier in tiers:
            name = f"probe-{probe.probe_id}-{trial.trial_id}-{tier}"
            chosen = policy(allocator="UNIFORM", uniform_tier=tier, override_quality_gate=True)
            landed, _ = round_trip(client, name, pool, prompt.kv, blocks, into, chosen, peer=probe.peer)
            # At once: the daemon looks at the transfer, and forgets those that have ended.
            verdicts = client.report_trials(probe.probe_id, [_result(model, prompt, landed, tier, name)])
            if on_progress is not None:
                on_progress(f"trial {trial.trial_id} of {len(probe.trials)} at {tier}")
    return verdicts


def _prefill(model: ProbeModel, trial: Any) -> _Prompt:
    kv = np.ascontiguousarray(model.prefill(trial.prompt))
    needle = trial.kind == probe_service_pb2.TRIAL_KIND_NEEDLE
    return _Prompt(trial, kv, [] if needle else list(model.next_tokens(kv, trial.suffix)))


def _result(
    model: ProbeModel, prompt: _Prompt, landed: NDArray[Any], tier: str, name: str
) -> probe_service_pb2.TrialResult:
    trial = prompt.trial
    result = probe_service_pb2.TrialResult(
        trial_id=trial.trial_id, tier=policy_pb2.Tier.Value(f"TIER_{tier}"), transfer_id=name
    )
    if trial.kind == probe_service_pb2.TRIAL_KIND_NEEDLE:
        result.answer = model.answer(landed, trial.suffix, trial.answer_characters)
        return result
    coded = model.next_tokens(landed, trial.suffix)
    result.agreement.positions = len(prompt.exact)
    result.agreement.agreed = sum(int(a) == int(b) for a, b in zip(prompt.exact, coded, strict=True))
    return result
