"""Whether vLLM's hooks tell enough for refinement."""

from __future__ import annotations

from typing import Any

# Layers whose blocks stay with a request until it is preempted or ends: others give some back while it runs, and tell nobody.
_KEPT_WHOLE = frozenset({"FullAttentionSpec"})


def check_refinable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ValueError where vLLM's hooks do not allow refinement."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
            if type(one).__name__ not in _KEPT_WHOLE:
                raise ValueError(f"spectrumkv.vllm: refine is not supported with {type(one).__name__}: "
                                 "such layers give blocks back while a request runs")  # fmt: skip
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise ValueError("spectrumkv.vllm: refine is not supported with vLLM's V2 model runner, which writes blocks that were "
                         "taken from a request before it tells of that: VLLM_USE_V2_MODEL_RUNNER=0")  # fmt: skip
