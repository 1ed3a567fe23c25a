"""Weights that are not finite: no conversion passes them on."""

from __future__ import annotations

import numpy as np

from ktforge.contract.tensors import BF16, TensorSpec
from ktforge.errors import CheckpointError

#: dtype → integers of its size without and with a sign, and the bits of its infinity. NaN lies above, so the largest
#: bits tell: of positive numbers as the one kind of integers, of negative ones as the other. Nothing is copied.
_BITS: dict[np.dtype, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    BF16: (np.int16, np.uint16, 0x7F80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000),
    np.dtype(np.float64): (np.int64, np.uint64, 0x7FF0000000000000),
}


def is_finite(array: np.ndarray) -> bool:
    """Whether all numbers of a contiguous array are; True of dtypes that are no floats of 16 bits or more."""
    if array.dtype not in _BITS or not array.size:
        return True
    signed, unsigned, infinity = _BITS[array.dtype]
    negative = infinity | 1 << (8 * array.dtype.itemsize - 1)
    return int(array.view(signed).max()) < infinity and int(array.view(unsigned).max()) < negative


def check_finite(tensor: TensorSpec, array: np.ndarray, first: int = 0) -> None:
    """Raises CheckpointError with the place if a number of an array is not finite; ``first`` is where on the first axis
    of ``tensor`` the array begins."""
    if is_finite(np.ascontiguousarray(array)):
        return
    for index, row in enumerate(array.reshape(array.shape[0] if array.ndim else 1, -1)):
        if not is_finite(np.ascontiguousarray(row)):
            wrong = int(np.argmin(np.isfinite(row.astype(np.float32, copy=False))))
            inner = np.unravel_index(wrong, array.shape[1:])
            raise not_finite(tensor, (first + index, *map(int, inner)))


def not_finite(tensor: TensorSpec, place: tuple[int, ...]) -> CheckpointError:
    """The refusal of a weight that is NaN or infinite at a place, such as (row, column)."""
    axes = ("expert", "row", "column")[3 - len(place) :] if len(place) in (2, 3) else ("place",) * len(place)
    where = ", ".join(f"{axis} {number}" for axis, number in zip(axes, place, strict=True))
    return CheckpointError(
        f"{tensor.file or 'the checkpoint'}: {tensor.name} is NaN or infinite at {where}, or above 3.39e38, the "
        "largest number that BF16 holds: get a good copy, for no weight of a sound model is any of these"
    )
