"""The last queries of a prompt, after RoPE, as they pass into vLLM's attention: what the daemon weighs tokens by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from spectrumkv.policies import recent_queries
from spectrumkv.v1 import policy_pb2
from spectrumkv.vllm.cache import layer_index
from spectrumkv.vllm.courier import Outgoing

_log = logging.getLogger("spectrumkv.vllm")
_MOST = 64


class QueryCapture:
    """Wraps the attention of layers whose queries can be read. vLLM's thread alone uses it.

    sends: those whose last tokens are computed in this step. A request is found in the batch by its blocks, for the connector is not told
    which row it is.
    """

    def __init__(self, layers: Mapping[str, Any], places: Mapping[str, int], sends: Callable[[], Iterable[Outgoing]]) -> None:
        self._places, self._sends = places, sends
        self.captured = [name for name in places if self._wrap(name, layers[name])]
        if len(self.captured) < len(places):
            missing = sorted(set(places) - set(self.captured))
            _log.warning("the last queries of %d layers cannot be captured (%s, ...): no attention of the usual kind",
                         len(missing), missing[0])  # fmt: skip

    def _wrap(self, name: str, layer: Any) -> bool:
        impl: Any = getattr(layer, "impl", None)
        original = getattr(impl, "forward", None)
        if original is None or not hasattr(impl, "scale") or not hasattr(impl, "head_size"):
            return False

        def forward(owner: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
            out = original(owner, query, key, value, kv_cache, metadata, *rest, **named)
            if metadata is not None:
                for outgoing in self._sends():
                    if outgoing.wants_queries:
                        self._capture(outgoing, name, impl, query, metadata)
            return out

        impl.forward = forward
        return True

    def _capture(self, outgoing: Outgoing, name: str, impl: Any, query: torch.Tensor, metadata: Any) -> None:
        first, last = _rows(outgoing, metadata)
        count = min(_MOST, last - first)
        values = query[last - count : last].reshape(count, -1, impl.head_size)
        words = values.dtype == torch.bfloat16
        array = (values.view(torch.int16) if words else values).numpy()
        end = outgoing.start.token_count
        window = impl.sliding_window if isinstance(impl.sliding_window, int) and impl.sliding_window > 0 else 0
        made: policy_pb2.RecentQueries = recent_queries(
            {layer_index(name): array.view("<u2") if words else array}, range(end - count, end), softmax_scale=impl.scale,
            logit_soft_cap=impl.logits_soft_cap or 0.0, window_tokens=window, bfloat16=words,
        )  # fmt: skip
        outgoing.queries.append((self._places[name], made))


def _rows(outgoing: Outgoing, metadata: Any) -> tuple[int, int]:
    """The request's rows in the step's queries; looked for once."""
    if outgoing.rows is None:
        blocks = outgoing.start.blocks
        ours = (metadata.block_table[:, 0] == blocks[0]) & (metadata.block_table[:, len(blocks) - 1] == blocks[-1])
        row = int(torch.nonzero(ours)[0])  # where two share the last block, too, all their tokens are the same
        outgoing.rows = int(metadata.query_start_loc[row]), int(metadata.query_start_loc[row + 1])
    return outgoing.rows
