"""Torch tensors over arrays of a pool, without a copy. PyTorch is imported when the first one is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS = np.dtype("<i2")  # numpy has no bfloat16: its arrays hold the words


def torch_view(array: NDArray[Any], dtype: str) -> Any:
    """A torch.Tensor of an array that pool.kv, k or v gave, of a group with this dtype.

    It shares the memory, so that both see what either writes. It must not be used after the pool was closed: keep the
    pool as long as the tensor. Raises ImportError where PyTorch is not installed.
    """
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(array.view(_WORDS)).view(torch.bfloat16)
    return torch.from_numpy(array)
