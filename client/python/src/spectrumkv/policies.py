"""Builds v1.Policy messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spectrumkv.v1 import policy_pb2, schema_pb2


def policy(
    *,
    budget: float | str | None = None,
    target_seconds: float | None = None,
    min_budget: float | None = None,
    allocator: str = "",
    tiers: Sequence[str] = (),
    uniform_tier: str = "",
    random_seed: int = 0,
    importance: str = "",
    scores: ArrayLike | None = None,
    queries: policy_pb2.RecentQueries | None = None,
    decay_lambda: float = 0.0,
    sinks: int | None = None,
    strict_budget: bool = False,
    payload_only: bool = False,
    override_quality_gate: bool = False,
    retain_seconds: float = 0.0,
    refine: str = "",
) -> policy_pb2.Policy:
    """How the tokens of a transfer are coded. What is not given is the daemon's default.

    budget: share of the raw KV bytes that may cross the wire, everything counted; a hard bound, in (0, 10].
        Above 1 only RAW needs, and a few tokens that pay for their headers. Not given: the daemon's default, raised to
        the least possible where a source cannot meet it. "auto": the daemon takes the least lossy budget whose predicted
        time meets target_seconds, not below min_budget (not given: its configured one); the report's budget_choice says
        which and why.
    allocator: "OPTIMAL", "GREEDY", "SINK_PROTECT", "BALANCED", "TWO_TIER", "UNIFORM", "RANDOM", "PDTRIM",
        "SLIDING_WINDOW_SINK" or "RAW". uniform_tier is for UNIFORM, random_seed for RANDOM.
    tiers: those that may be used: "RAW", "P8", "Q8", "Q4", "P4", "Q3", "Q2", "DROP".
    importance: "SCORES", "POSITION", "KEY_NORM", "NONE" or "RECENT_QUERIES".
    scores: importance of each token, [tokens] or [layers, tokens]: attention received, divided by the number of
        queries that could see the token. Finite, not negative.
    queries: from recent_queries(), in place of scores: the daemon computes what they attend to. A layer-wise source is opened
        with importance="RECENT_QUERIES" and gives them with advance.
    decay_lambda: importance of token j of n is multiplied by exp(-decay_lambda * (n - j)).
    sinks: tokens at the front that are always RAW; not given: 4, or with OPTIMAL and scores or queries 1.
    retain_seconds: for so long after the commit the source's blocks stay held, so that the destination may ask for better
        precision (Client.refine); release ends it. 0: not at all.
    refine: a tier, "RAW" or "Q8": the destination's daemon refines to it on its own, over idle link time. Needs retain_seconds.
    override_quality_gate: use tiers although no probe has opened them to this model; the report says so.

    Raises ValueError for a name that does not exist, and for target_seconds or min_budget without budget="auto".
    """
    message = policy_pb2.Policy(
        random_seed=random_seed, strict_budget=strict_budget, payload_only=payload_only,
        override_quality_gate=override_quality_gate, retain_seconds=retain_seconds,
    )  # fmt: skip
    if refine:
        message.refine.final = _value(policy_pb2.Tier, "TIER_", refine)
    if budget == "auto":
        if target_seconds is None:
            raise ValueError('budget="auto" needs target_seconds')
        message.auto_budget.target_seconds = target_seconds
        if min_budget is not None:
            message.auto_budget.min_budget = min_budget
    elif target_seconds is not None or min_budget is not None:
        raise ValueError('target_seconds and min_budget are for budget="auto"')
    elif isinstance(budget, str):
        raise ValueError(f'budget is a number or "auto", not {budget!r}')
    elif budget is not None:
        message.budget = budget
    if allocator:
        message.allocator = _value(policy_pb2.Allocator, "ALLOCATOR_", allocator)
    if uniform_tier:
        message.uniform_tier = _value(policy_pb2.Tier, "TIER_", uniform_tier)
    message.tiers.extend(_value(policy_pb2.Tier, "TIER_", name) for name in tiers)
    if importance:
        message.importance.source = _value(policy_pb2.ImportanceSource, "IMPORTANCE_SOURCE_", importance)
    if scores is not None:
        values = np.asarray(scores, np.float32)
        if values.ndim not in (1, 2):
            raise ValueError(f"scores must be [tokens] or [layers, tokens], not of shape {values.shape}")
        message.importance.scores.extend(values.reshape(-1).tolist())
        message.importance.scores_per_layer = values.ndim == 2
    if queries is not None:
        message.importance.queries.CopyFrom(queries)
    message.importance.decay_lambda = decay_lambda
    if sinks is not None:
        message.importance.sinks = sinks
    return message


def recent_queries(
    queries: Mapping[int, NDArray[Any]] | NDArray[Any],
    positions: Sequence[int],
    *,
    softmax_scale: float = 0.0,
    logit_soft_cap: float = 0.0,
    window_tokens: int | Mapping[int, int] = 0,
    bfloat16: bool = False,
) -> policy_pb2.RecentQueries:
    """The last queries of a prompt, from which the daemon computes how much tokens matter.

    queries: RoPE applied as to the keys in the cache, [positions, query_heads, head_dim] for each of some layers: a mapping
        by index of the layer in the model, or one array [layers, positions, query_heads, head_dim] of layers 0, 1, ...
        float16, float32, or with bfloat16=True uint16 words of that type. query_heads: those of this worker.
    positions: of the queries, in tokens of the request; at most 64, ascending.
    softmax_scale: 0 for 1 / sqrt(head_dim). logit_soft_cap: 0 for none.
    window_tokens: keys a query sees, its own position the last, for all layers or by layer; 0 for what the group says.

    Raises ValueError for shapes and types that do not fit.
    """
    by_layer = dict(queries.items()) if isinstance(queries, Mapping) else dict(enumerate(queries))
    types = {"float16": schema_pb2.DATA_TYPE_FLOAT16, "float32": schema_pb2.DATA_TYPE_FLOAT32}
    if bfloat16:
        types = {"uint16": schema_pb2.DATA_TYPE_BFLOAT16}
    message = policy_pb2.RecentQueries(positions=positions)
    for layer, values in by_layer.items():
        data_type = types.get(values.dtype.name)
        if data_type is None or message.data_type not in (0, data_type):
            raise ValueError(f"queries of layer {layer} are {values.dtype}; all must be one of {', '.join(types)}")
        if values.ndim != 3 or len(values) != len(positions):
            raise ValueError(f"queries of layer {layer} have shape {values.shape}, not [{len(positions)}, heads, head_dim]")
        message.data_type = data_type
        window = window_tokens.get(layer, 0) if isinstance(window_tokens, Mapping) else window_tokens
        message.layers.add(
            layer=layer, queries=np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes(),
            query_heads=values.shape[1], softmax_scale=softmax_scale, logit_soft_cap=logit_soft_cap, window_tokens=window,
        )  # fmt: skip
    return message


def _value(enum: Any, prefix: str, name: str) -> Any:
    full = prefix + name
    if full not in enum.keys() or name == "UNSPECIFIED":
        known = ", ".join(key.removeprefix(prefix) for key in enum.keys() if not key.endswith("UNSPECIFIED"))
        raise ValueError(f"{name!r} is none of {known}")
    return enum.Value(full)


def tier_name(tier: int) -> str:
    """ "Q4" for TIER_Q4."""
    return str(policy_pb2.Tier.Name(tier)).removeprefix("TIER_")
