"""The parts of the connector that need PyTorch, without vLLM: run by the interpreter of install.sh, through test_parts.py."""

import importlib.util
import json
import pathlib
import sys
import types
import unittest

import numpy as np
import torch

from spectrumkv.v1 import policy_pb2
from spectrumkv.vllm.cache import Heads, SharedMemory, cpu_groups, layer_index
from spectrumkv.vllm.courier import Outgoing
from spectrumkv.vllm.queries import QueryCapture
from spectrumkv.vllm.steps import SendStart

BLOCKS, HEADS, TOKENS, DIM = 7, 3, 32, 16
ATTENTION = Heads(HEADS, 0)


def cache_of(memory, layers=2, dtype=torch.float32, shape=(BLOCKS, HEADS, TOKENS, 2 * DIM)):
    """As vLLM allocates it: one allocation, a view of it for each layer."""
    size = int(np.prod(shape)) * dtype.itemsize
    with memory.allocating():
        raw = torch.zeros(layers * size, dtype=torch.int8, device=torch.device("cpu"))
        other = torch.zeros((2, 3))
    assert not other.any()
    return {f"model.layers.{i}.self_attn.attn": raw[i * size : (i + 1) * size].view(dtype).view(shape) for i in range(layers)}


class Cache(unittest.TestCase):
    def setUp(self):
        self.memory = SharedMemory()
        self.addCleanup(self.memory.close)

    def groups(self, caches, layout="vec", heads=ATTENTION):
        return cpu_groups(caches, dict.fromkeys(caches, layout), heads, self.memory)

    def test_every_element_is_where_the_schema_says(self):
        """K of a block and head is [head_dim, tokens] (transposed), its V [tokens, head_dim], one behind the other."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            caches = cache_of(self.memory, dtype=dtype)
            schema, groups = self.groups(caches)
            self.assertEqual(len(groups), 1)
            segment = self.memory.segments[-1]
            (told,) = schema.groups
            self.assertEqual((told.head_count, told.head_dim, told.block_tokens, told.num_blocks), (HEADS, DIM, TOKENS, BLOCKS))
            for tensors, cache in zip(told.layers, caches.values(), strict=True):
                words = cache.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
                words.view(-1)[:] = torch.arange(words.numel()) % 30011
                both = words.view(BLOCKS, HEADS, 2, TOKENS * DIM).numpy()
                flat = segment.memory.view(both.dtype)
                for block, head, token, dim in ((0, 0, 0, 0), (6, 2, 31, 15), (3, 1, 17, 4)):
                    for view, value in ((tensors.k, both[block, head, 0, dim * TOKENS + token]),
                                        (tensors.v, both[block, head, 1, token * DIM + dim])):  # fmt: skip
                        at = (view.offset_bytes + block * view.block_stride_bytes + head * view.head_stride_bytes
                              + token * view.token_stride_bytes + dim * view.dim_stride_bytes)  # fmt: skip
                        self.assertEqual(flat[at // both.itemsize], value)

    def test_heads_of_a_rank(self):
        (told,) = self.groups(cache_of(self.memory), heads=Heads(12, 6))[0].groups
        self.assertEqual((told.heads_total, told.head_first, told.head_count), (12, 6, HEADS))

    def test_layers_that_share_a_cache_are_one(self):
        caches = cache_of(self.memory)
        caches["model.layers.2.self_attn.attn"] = caches["model.layers.1.self_attn.attn"]
        self.assertEqual([one.layer for one in self.groups(caches)[0].groups[0].layers], [0, 1])

    def test_layers_of_two_shapes_are_two_groups(self):
        caches = cache_of(self.memory, 1)
        other = cache_of(self.memory, 1, shape=(BLOCKS, 1, TOKENS, 2 * DIM))
        caches["model.layers.1.self_attn.attn"] = next(iter(other.values()))
        schema, groups = self.groups(caches)
        self.assertEqual([group.head_count for group in schema.groups], [HEADS, 1])
        self.assertEqual(len(schema.segments), 2)

    def test_refused(self):
        caches = cache_of(self.memory)
        elsewhere = {"model.layers.0.attn": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)}
        flat = {"model.layers.0.attn": next(iter(caches.values())).view(BLOCKS, -1)}
        turned = {"model.layers.0.attn": next(iter(caches.values())).transpose(2, 3)}
        for wrong, layout, words in (
            (caches, "amx", "memory layout"), (caches, "", "memory layout"), (elsewhere, "vec", "has not allocated"),
            (flat, "vec", "shape"), (turned, "vec", "shape"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, words):
                self.groups(wrong, layout)

    def test_index_of_a_layer(self):
        self.assertEqual(layer_index("model.layers.17.self_attn.attn"), 17)
        for name in ("model.attn", "layers.1.experts.2.attn"):
            with self.assertRaises(ValueError):
                layer_index(name)


class Kernel(unittest.TestCase):
    def test_vllm_writes_where_the_schema_says(self):
        """vLLM's own kernel, in the memory layouts that are taken, for every data type."""
        (library,) = pathlib.Path(importlib.util.find_spec("vllm").origin).parent.glob("_C_AVX2*.so")
        torch.ops.load_library(str(library))
        memory = SharedMemory()
        self.addCleanup(memory.close)
        for layout in ("vec", "vec16"):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                name, cache = next(iter(cache_of(memory, 1, dtype, (3, HEADS, TOKENS, 2 * 64)).items()))
                planes = cache.view(3, HEADS, 2 * TOKENS, 64).chunk(2, dim=2)
                key, value = torch.randn(2, 40, HEADS, 64).to(dtype)
                slots = torch.arange(5, 45, dtype=torch.int64)
                torch.ops._C.cpu_attn_reshape_and_cache(key, value, *planes, slots, layout, 1.0, 1.0, "auto")
                schema, _ = cpu_groups({name: cache}, {name: layout}, ATTENTION, memory)
                (tensors,) = schema.groups[0].layers
                flat = memory.segments[-1].memory.view("<u4" if dtype.itemsize == 4 else "<u2")
                for view, wanted in ((tensors.k, key), (tensors.v, value)):
                    wanted = wanted.view(torch.int32 if dtype.itemsize == 4 else torch.int16).numpy().view(flat.dtype)
                    strides = (view.block_stride_bytes, view.token_stride_bytes, view.head_stride_bytes, view.dim_stride_bytes)
                    there = np.lib.stride_tricks.as_strided(
                        flat[view.offset_bytes // flat.itemsize :], (3, TOKENS, HEADS, 64), strides
                    )  # fmt: skip
                    np.testing.assert_array_equal(there.reshape(-1, HEADS, 64)[5:45], wanted, f"{layout} {dtype}")


class Impl:
    scale, logits_soft_cap, sliding_window, head_size = 0.25, 30.0, 128, DIM

    def forward(self, layer, query, key, value, kv_cache, metadata, output=None):
        return query


def step(blocks, tokens, starts):
    return types.SimpleNamespace(block_table=torch.tensor(blocks), seq_lens=torch.tensor(tokens), query_start_loc=torch.tensor(starts))


class Queries(unittest.TestCase):
    def setUp(self):
        self.sends = []
        layers = {f"model.layers.{i}.attn": types.SimpleNamespace(impl=Impl()) for i in range(2)}
        layers["model.layers.2.attn"] = types.SimpleNamespace(impl=object())
        self.layers = layers
        self.capture = QueryCapture(layers, {name: i for i, name in enumerate(layers)}, lambda: self.sends)

    def outgoing(self, blocks, tokens, policy=None):
        raw = None if policy is None else policy.SerializeToString()
        made = Outgoing(SendStart("r", "t", b"", "", blocks, tokens, 0, raw), 2, print, print)
        made.want_queries()
        self.sends.append(made)
        return made

    def test_the_last_queries_of_the_request_in_a_batch(self):
        outgoing = self.outgoing([4, 9], 40)
        query = torch.randn(80, 2, DIM)
        metadata = step([[4, 8, 0], [4, 9, 0], [5, 6, 7]], [40, 40, 90], [0, 5, 45, 80])
        for name in self.capture.captured:
            self.assertIs(self.layers[name].impl.forward(None, query, None, None, None, metadata), query)
        self.assertEqual([place for place, _ in outgoing.queries], [0, 1])
        _, made = outgoing.queries[1]
        self.assertEqual(list(made.positions), list(range(40)))
        (layer,) = made.layers
        self.assertEqual((layer.layer, layer.query_heads, layer.window_tokens), (1, 2, 128))
        self.assertAlmostEqual(layer.softmax_scale, 0.25)
        self.assertAlmostEqual(layer.logit_soft_cap, 30.0)
        np.testing.assert_array_equal(np.frombuffer(layer.queries, "<f4").reshape(40, 2, DIM), query[5:45].numpy())

    def test_sixty_four_of_many_and_words_of_bfloat16(self):
        outgoing = self.outgoing([1], 100)
        query = torch.randn(100, 2 * DIM).to(torch.bfloat16)
        self.layers["model.layers.0.attn"].impl.forward(None, query, None, None, None, step([[1]], [100], [0, 100]))
        _, made = outgoing.queries[0]
        self.assertEqual(list(made.positions), list(range(36, 100)))
        words = np.frombuffer(made.layers[0].queries, "<i2").reshape(64, -1)
        np.testing.assert_array_equal(words, query[36:].view(torch.int16).numpy())

    def test_attention_of_another_kind_is_left_alone(self):
        self.assertEqual(self.capture.captured, ["model.layers.0.attn", "model.layers.1.attn"])

    def test_policies_that_want_none(self):
        raw = policy_pb2.Policy(allocator=policy_pb2.ALLOCATOR_RAW)
        other = policy_pb2.Policy()
        other.importance.source = policy_pb2.IMPORTANCE_SOURCE_POSITION
        self.assertEqual([self.outgoing([1], 4, one).wants_queries for one in (None, raw, other)], [True, False, False])
        self.layers["model.layers.0.attn"].impl.forward(None, torch.randn(4, 2, DIM), None, None, None, step([[1]], [4], [0, 4]))
        self.assertEqual([len(one.queries) for one in self.sends], [1, 0, 0])


if __name__ == "__main__":
    result = unittest.TextTestRunner(sys.stderr, verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__]))
    print(json.dumps({"run": result.testsRun}))
    sys.exit(not result.wasSuccessful())
