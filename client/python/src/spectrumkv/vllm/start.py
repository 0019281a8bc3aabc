"""Makes the worker's side of what vLLM gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectrumkv.vllm.cache import CachePool, Heads, SharedMemory, cpu_groups, layer_index
from spectrumkv.vllm.courier import Courier
from spectrumkv.vllm.queries import QueryCapture
from spectrumkv.vllm.settings import Settings
from spectrumkv.vllm.worker import WorkerSide


def make_worker(vllm_config: Any, settings: Settings, kv_caches: Mapping[str, Any], memory: SharedMemory) -> WorkerSide:
    """Registers the cache at the daemon. Raises ValueError for a cache that cannot be transferred, SpectrumKVError."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    layers = vllm_config.compilation_config.static_forward_context
    devices = {cache.device.type for cache in kv_caches.values()}
    if devices != {"cpu"}:
        raise ValueError(f"spectrumkv.vllm: a KV cache on {', '.join(sorted(devices))} is not supported yet")
    size, rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
    total = model.get_total_num_kv_heads()
    held = model.get_num_kv_heads(parallel)
    layouts = {name: str(getattr(layers[name], "isa", "")) for name in kv_caches}
    heads = Heads(total, min(rank * total // size, total - held))
    schema, groups = cpu_groups(kv_caches, layouts, heads, memory)
    served = model.served_model_name
    name = settings.model or (served[0] if isinstance(served, list) else served) or model.model
    schema.model, schema.revision = name, settings.revision
    schema.tensor_parallel_rank, schema.tensor_parallel_size = rank, size
    courier = Courier(settings)
    pool = CachePool(courier.client.sync, schema, groups)
    order = sorted(index for group in groups for index in group.layers)
    places = {name: order.index(layer_index(name)) for name in kv_caches if layer_index(name) in order}
    worker = WorkerSide(
        pool, courier, places, rank=rank, size=size, idle_wait_s=settings.idle_wait_ms / 1000,
        refine_step_bytes=settings.refine_step_bytes,
    )  # fmt: skip
    if settings.recent_queries:
        worker.captures_queries = bool(QueryCapture(layers, places, lambda: worker.sends_now).captured)
    return worker
