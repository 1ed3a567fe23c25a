"""numpy arrays as torch tensors, without a copy, and state dicts whose tensors are read when they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

# torch has no read-only tensors and warns of every mapped file; nothing here writes to one.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

#: Formats that torch knows and numpy does not: their bits, and what torch calls them.
_BITS: dict[np.dtype, tuple[type, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
    np.dtype(ml_dtypes.float8_e8m0fnu): (np.uint8, torch.float8_e8m0fnu),
}


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A tensor in the memory of ``array``."""
    if array.dtype not in _BITS:
        return torch.from_numpy(array)
    bits, dtype = _BITS[array.dtype]
    return torch.from_numpy(array.view(bits)).view(dtype)


def dtype_of(dtype: np.dtype) -> torch.dtype:
    """What torch calls a dtype."""
    return _BITS[dtype][1] if dtype in _BITS else torch.from_numpy(np.empty(0, dtype)).dtype


class LazyTensor:
    """A tensor that is read when transformers slices it, as it does with those of a safetensors file."""

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], read: Callable[[], np.ndarray]) -> None:
        self.dtype, self.shape, self._read = dtype_of(dtype), shape, read

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: object) -> torch.Tensor:
        return tensor_of(self._read())[index]  # type: ignore[index]
