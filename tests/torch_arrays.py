"""Tensors as numpy arrays and back, bit for bit, for comparisons with libraries that use torch."""

import numpy as np
import torch

from ktforge.contract.tensors import DTYPES

_DTYPES = {d: getattr(torch, d.name) for d in DTYPES.values() if hasattr(torch, d.name)} | {
    np.dtype(np.bool_): torch.bool
}
_BACK = {t: n for n, t in _DTYPES.items()}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(_BACK[tensor.dtype]).reshape(tuple(tensor.shape))


def to_torch(array: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
    return flat.view(_DTYPES[array.dtype]).reshape(array.shape)
