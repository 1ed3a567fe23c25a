"""Sizes and places that specifications work out."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import BF16

from ktforge import FileSpec, Part, QuantSpec, TensorSpec, UnitSpec
from ktforge.contract.tensors import DTYPES, F32, total_bytes

WEIGHT = TensorSpec("w", BF16, (7, 100))
UNIT = UnitSpec("u", {"weight": WEIGHT})


def spec(size, **more):
    return QuantSpec(UNIT, (Part("", 0, (0, 7), (0, 100)), Part("", 1, (2, 4), (0, 64))), 4, "m/1", size, **more)


@pytest.mark.parametrize(
    ("size", "groups"),
    [(None, (1, 1)), (100, (1, 1)), (32, (4, 2)), (33, (4, 2)), (50, (2, 2)), (1, (100, 64)), (101, (1, 1))],
)
def test_the_last_group_of_a_row_may_be_shorter(size, groups):
    quant = spec(size)
    assert tuple(quant.groups(part) for part in quant.parts) == groups


@pytest.mark.parametrize(("dtype", "bytes_each"), [(F32, 8), (BF16, 6)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_of_codes_and_of_scales_as_they_are_made_and_stored(dtype, bytes_each, symmetric):
    """A quantizer computes float32 scales and then has them in the layout's dtype."""
    quant = spec(32, scale_dtype=dtype, symmetric=symmetric)
    assert quant.nbytes == 7 * 100 + 2 * 64 + (7 * 4 + 2 * 2) * (bytes_each + (not symmetric))


@pytest.mark.parametrize(
    ("bits", "scale_bits", "step"), [(4, None, 1), (8, None, 1), (8, 8, 1), (4, 8, 16), (2, 8, 64)]
)
def test_what_a_code_counts(bits, scale_bits, step):
    assert spec(None)._replace(bits=bits, scale_bits=scale_bits).step == step


def test_rows_of_a_tensor_begin_where_those_before_end():
    tensor = TensorSpec("t", F32, (5, 3, 2), Path("f"), 100)
    assert tensor.rows(0, 5) == tensor
    assert tensor.rows(2, 5) == TensorSpec("t", F32, (3, 3, 2), Path("f"), 100 + 2 * 24)
    assert tensor.rows(4, 5).rows(0, 1) == tensor.rows(4, 5) and tensor.rows(1, 4).rows(1, 2) == tensor.rows(2, 3)


def test_bytes_are_those_of_every_tensor():
    tensors = [TensorSpec(str(i), dtype, (i, 3)) for i, dtype in enumerate([*DTYPES.values()] * 2)]
    assert total_bytes(tensors) == sum(i * 3 * t.dtype.itemsize for i, t in enumerate(tensors))
    assert FileSpec("f", b"12345", tuple(tensors)).nbytes == 5 + total_bytes(tensors)
    assert TensorSpec("scalar", F32, ()).nbytes == 4 and TensorSpec("empty", F32, (0, 9)).nbytes == 0


def test_new_bytes_are_those_that_a_stage_makes():
    known = {"a": TensorSpec("x", F32, (4,)), "b": TensorSpec("y", F32, (4,)), "c": TensorSpec("z", F32, (4,))}
    made = UnitSpec("u", {**known, "b": TensorSpec("y", BF16, (4,)), "c": TensorSpec("z", F32, (5,)), "d": WEIGHT})
    assert made.new_bytes(known) == 8 + 20 + WEIGHT.nbytes
    assert made.new_bytes(known, ("d", "c")) == 8
    assert made.new_bytes({}) == made.nbytes == 16 + 8 + 20 + WEIGHT.nbytes


def test_a_part_is_its_rectangle():
    weight = np.arange(70).reshape(7, 10)
    part = Part("up", 1, (2, 5), (4, 10))
    assert part.shape == (3, 6) and part.role == "up.weight" and part.of(weight).tolist() == weight[2:5, 4:10].tolist()
