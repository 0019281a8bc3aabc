"""The class that vLLM loads. It hands vLLM's calls to scheduler.py and worker.py, and nothing more."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from spectrumkv.client import Client
from spectrumkv.v1 import schema_pb2
from spectrumkv.vllm.refinable import check_refinable
from spectrumkv.vllm.scheduler import CALL_S, SchedulerSide
from spectrumkv.vllm.settings import Settings
from spectrumkv.vllm.stats import TransferCounts, TransferMetrics
from spectrumkv.vllm.steps import Step
from spectrumkv.vllm.worker import WorkerSide


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: Step


@dataclass
class PoolMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    pool_id: str
    epoch: int


@dataclass
class PoolUpdate(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Pools that were registered anew, by rank."""

    pools: dict[int, PoolMetadata] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PoolUpdate:
        assert isinstance(other, PoolUpdate)
        return PoolUpdate({**self.pools, **other.pools})


class SpectrumKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """--kv-transfer-config '{"kv_connector": "SpectrumKVConnector", "kv_connector_module_path": "spectrumkv.vllm",
    "kv_role": ..., "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"daemon": ...}}'; docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError("spectrumkv.vllm: pipeline parallelism is not supported")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("spectrumkv.vllm: models with several KV cache groups are not supported")
        if self.settings.refine:
            check_refinable(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._memory: Any = None
        self._told: PoolMetadata | None = None
        if role == KVConnectorRole.SCHEDULER:
            client = Client(self.settings.daemon, timeout_s=CALL_S, token_file=self.settings.token_file)
            self._pools: dict[int, PoolMetadata] = {}
            self._scheduler = SchedulerSide(
                self.settings, client, vllm_config.cache_config.block_size, num_blocks=kv_cache_config.num_blocks
            )
        else:
            from spectrumkv.vllm.cache import SharedMemory

            self._memory = SharedMemory(self.settings.shared_dir)

    # ---- worker ----------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> Any:
        return self._memory.allocating()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from spectrumkv.vllm.start import make_worker

        self._worker = make_worker(self._vllm_config, self.settings, kv_caches, self._memory)

    def get_handshake_metadata(self) -> PoolMetadata | None:
        if self._worker is None:
            return None
        ref = self._worker.pool.ref
        self._told = PoolMetadata(ref.pool_id, ref.epoch)
        return self._told

    def build_connector_worker_meta(self) -> PoolUpdate | None:
        if self._worker is None or self._told is None:
            return None
        ref = self._worker.pool.ref
        if (ref.pool_id, ref.epoch) == (self._told.pool_id, self._told.epoch):
            return None
        self._told = PoolMetadata(ref.pool_id, ref.epoch)
        return PoolUpdate({self._worker.rank: self._told})

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        if self._worker is not None:
            self._worker.preempt(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began, and refinements were applied, when the step was told: this comes after the step's computation."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request that is computed waits for KV: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.layer_written(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.step_written()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        sent, received = self._worker.take_ended()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> TransferCounts | None:
        side = self._scheduler or self._worker
        counts = None if side is None else side.take_counts()
        return TransferCounts(dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferCounts:
        return TransferCounts(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        with contextlib.ExitStack() as sides:  # the last one first, and each also where another one fails
            for side in (self._scheduler, self._memory, self._worker):
                if side is not None:
                    sides.callback(side.close)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # layers are sent as they are written

    # ---- scheduler -------------------------------------------------------------------------------------------------

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, PoolMetadata]) -> None:
        self._pools = dict(metadata)
        self._tell_pools()

    def _tell_pools(self) -> None:
        ranks = sorted(self._pools)
        pools = [self._pools[rank] for rank in ranks]
        self._side.set_pools([schema_pb2.PoolRef(pool_id=pool.pool_id, epoch=pool.epoch) for pool in pools])

    def on_new_request(self, request: Any) -> None:
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._side.num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.update_after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._side.build_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        update = connector_output.kv_connector_worker_meta
        if isinstance(update, PoolUpdate):
            self._pools.update(update.pools)
            self._tell_pools()
        self._side.failed_blocks(connector_output.invalid_block_ids or set())
        self._side.finished_receiving(connector_output.finished_recving or ())
        self._side.finished_sending(connector_output.finished_sending or ())
        self._side.report_first_tokens()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._side.request_finished(request, request.status.name == "FINISHED_ABORTED")
