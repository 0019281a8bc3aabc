"""PyTorch tensors over pools, without a copy."""

import sys

import numpy as np
import pytest

import spectrumkv as skv

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="SKIPPED: PyTorch is not installed in .venv")


@needs_torch
@pytest.mark.parametrize("layout", ["LPBTHD", "LPBHTD", "LBPTHD", "BLPTHD", "LPBHDT"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_share_the_memory(client, dtype, layout):
    group = skv.Group(layers=[2, 5], heads=3, head_dim=16, block_tokens=4, num_blocks=7, dtype=dtype, axes=layout)
    with client.shared_memory_pool([group], model="m") as pool:
        keys, values, cache = pool.torch_k(5), pool.torch_v(2), pool.torch()
        assert keys.dtype == getattr(torch, dtype) and tuple(keys.shape) == (7, 4, 3, 16)
        keys[6, 3, 2, 15] = 1.5
        word = pool.k(5)[6, 3, 2, 15]
        assert word == (0x3FC0 if dtype == "bfloat16" else 1.5)
        pool.v(2)[0] = 0x4000 if dtype == "bfloat16" else 2.0
        assert bool((values[0] == 2).all()) and bool((values[1] == 0).all())
        assert float(cache[1, 0, 6, 3, 2, 15]) == 1.5 and tuple(cache.shape) == group.shape
        # Everything is where the strides say: no element of a copy.
        base = pool.segment.memory.ctypes.data
        assert all(base <= tensor.data_ptr() < base + pool.segment.size_bytes for tensor in (keys, values, cache))


@needs_torch
def test_a_tensor_of_a_part(client):
    group = skv.Group(layers=[0], heads=2, head_dim=8, block_tokens=4, num_blocks=6, dtype="bfloat16")
    with client.shared_memory_pool([group], model="m") as pool:
        part = skv.torch_view(pool.k(0)[1:5:2, ::2], "bfloat16")
        part.fill_(-1)
        assert (pool.k(0)[[1, 3]][:, [0, 2]] == 0xBF80).all()
        assert np.count_nonzero(pool.kv()) == part.numel()


@pytest.mark.skipif(torch is not None, reason="SKIPPED: PyTorch is installed")
def test_without_pytorch_only_these_calls_fail(client):
    group = skv.Group(layers=[0], heads=2, head_dim=8, block_tokens=4, num_blocks=6)
    with client.shared_memory_pool([group], model="m") as pool:
        assert "torch" not in sys.modules
        with pytest.raises(ImportError):
            pool.torch_k(0)
