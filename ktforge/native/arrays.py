"""What kernels need to know of an array before they are given its memory."""

from __future__ import annotations

import numpy as np

from ktforge._native import ffi


def pointer(array: np.ndarray, ctype: str) -> object:
    return ffi.cast(ctype, array.__array_interface__["data"][0])


def is_array(array: np.ndarray, dtype: object, shape: tuple[int, ...]) -> bool:
    flags = array.flags
    return array.dtype == dtype and array.shape == shape and flags.c_contiguous and flags.aligned


def row_stride(matrix: np.ndarray) -> int:
    """Distance between rows in elements. Raises ValueError if the rows themselves are not contiguous."""
    n, k = matrix.shape
    if matrix.size == 0:
        return k
    size = matrix.itemsize
    require(matrix.flags.aligned and (k == 1 or matrix.strides[1] == size), "rows must be contiguous")
    if n == 1:
        return k
    require(matrix.strides[0] >= k * size and matrix.strides[0] % size == 0, "rows must follow one another")
    return matrix.strides[0] // size


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
