"""What the connector counts, in vLLM's log and on its /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_METRIC = "vllm:spectrumkv_requests"
_ABOUT = "Requests by what became of their KV transfer: sends, loads committed, failed, refused, preempted; refinements."
_BYTES_METRIC = "vllm:spectrumkv_refined_bytes"
_BYTES_ABOUT = "Bytes of the KV cache that were made better between steps."
# The one event that counts bytes.
REFINED_BYTES = "refined_bytes"


class TransferCounts(KVConnectorStats):  # type: ignore[misc]
    """data: event -> number."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> TransferCounts:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter with a label for the event, and one of bytes."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kind = metric_types[prometheus_client.Counter]
        self._counter = kind(name=_METRIC, documentation=_ABOUT, labelnames=[*labelnames, "event"])
        self._bytes = kind(name=_BYTES_METRIC, documentation=_BYTES_ABOUT, labelnames=labelnames)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for event, number in transfer_stats_data.items():
            if event == REFINED_BYTES:
                self._bytes.labels(*labels).inc(number)
            else:
                self._counter.labels(*labels, event).inc(number)
