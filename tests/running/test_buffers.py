"""Buffers begin on a cache line each, do not touch, and are one block of memory that is used again."""

import numpy as np
import pytest
from checkpoints import BF16

from ktforge import PackedSpec, TensorSpec
from ktforge.running.buffers import ALIGNMENT, Buffers

SHAPES = [
    ("a", np.int8, (3,)), ("b", np.float32, (5,)), ("c", BF16, (33, 3)), ("d", np.int8, ()), ("e", np.int64, (0, 2)),
    ("f", np.float32, (16,)), ("g", np.int64, (9,)),
]  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_buffers_lie_apart_on_lines_of_their_own(order):
    packed = PackedSpec(tuple(TensorSpec(n, np.dtype(d), s) for n, d, s in SHAPES[::order]), "x/1")
    buffers = Buffers()
    arrays = buffers.of(packed)
    assert list(arrays) == [t.name for t in packed.tensors]
    assert [(a.dtype, a.shape) for a in arrays.values()] == [(t.dtype, t.shape) for t in packed.tensors]
    begin = buffers._memory.__array_interface__["data"][0]
    for number, array in enumerate(arrays.values()):
        assert (array.__array_interface__["data"][0] - begin) % ALIGNMENT == 0
        array.reshape(-1).view(np.uint8)[:] = number + 1
    for number, array in enumerate(arrays.values()):
        assert set(array.reshape(-1).view(np.uint8)) <= {number + 1}, "none lies over another"
    again = buffers.of(PackedSpec(packed.tensors[:2], "x/1"))
    assert all(again[n].__array_interface__["data"] == arrays[n].__array_interface__["data"] for n in again)
    buffers.clear()
    assert buffers._memory.nbytes == 0
