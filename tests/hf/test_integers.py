"""Codes times activations in int8, against NumPy's integers."""

import numpy as np
import pytest
import torch
from hf.conftest import LAYOUTS

from ktforge import hf
from ktforge.hf.experts import ExpertSource
from ktforge.hf.integers import rounded_to_int8
from ktforge.hf.sides import ROLES, open_side


def source_of(folder):
    return ExpertSource(
        open_side(folder), dtype=torch.float32, device=torch.device("cpu"), cache=0, workers=1, integers=True
    )


def stated(side, layer, expert, role, x):
    """The product [n, out] by integers of NumPy: each part rounds its columns, each group has its scale."""
    spec = side.places[layer, expert, role].tensor
    out = np.zeros((len(x), spec.shape[0]), np.float64)
    for quant, part in side.packed.parts(spec):
        (place,) = quant.parts
        columns = x[:, slice(*place.cols)]
        amax = np.abs(columns).max(axis=1, keepdims=True)
        scale = (amax / np.float32(127)).astype(np.float32)
        rounded = np.rint(np.divide(columns, scale, where=scale > 0, out=np.zeros_like(columns))).astype(np.int64)
        codes = part.codes.astype(np.int64)
        width = quant.group_size or codes.shape[1]
        for group in range(codes.shape[1] // width):
            cut = slice(group * width, (group + 1) * width)
            zeros = 0 if part.zeros is None else part.zeros[:, group : group + 1].astype(np.int64)
            sums = rounded[:, cut] @ (codes[:, cut] - zeros).T
            out[:, slice(*place.rows)] += sums * part.scales[:, group].astype(np.float64) * quant.step * scale
    return out


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "bf16"])
def test_a_projection_is_what_numpy_says(converted, name):
    source = source_of(converted[name])
    random = np.random.default_rng(0)
    for layer, number in ((0, 0), (1, 3)):
        expert = source.get(layer, number)
        hidden = random.standard_normal((5, 256), np.float32)
        hidden[3] = 0
        middle = random.standard_normal((5, 512), np.float32) ** 3
        gate, up = expert.gate_up(torch.from_numpy(hidden)).chunk(2, dim=-1)
        found = dict(zip(ROLES, (gate, up, expert.down(torch.from_numpy(middle))), strict=True))
        for role, given in zip(ROLES, (hidden, hidden, middle), strict=True):
            wanted = stated(source.side, layer, number, role, given)
            np.testing.assert_allclose(found[role].numpy(), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_sums_of_many_columns_are_exact():
    """More products than float32 can add up: all of the largest, and one that a rounded sum would lose."""
    from ktforge.contract.tensors import Part, QuantPart, QuantSpec, UnitSpec
    from ktforge.hf.integers import IntegerProjection

    width = 7168
    codes = np.full((2, width), 127, np.int8)
    codes[1, -1] = 126
    spec = QuantSpec(UnitSpec("x", {}), (Part("", 0, (0, 2), (0, width)),), 8, "absmax/1")
    scales = np.ones((2, 1), np.float32)
    projection = IntegerProjection([(spec, QuantPart(codes, scales))], (2, width), torch.float64, torch.device("cpu"))
    x = torch.full((1, width), 127.0)
    x[0, -1] = 1.0  # rounds to 1
    full = 127 * 127 * (width - 1)
    wanted = np.float32(full + 127), np.float32(full + 126)
    assert projection(x).tolist() == [[float(w) for w in wanted]]


def test_rounding():
    codes, scales = rounded_to_int8(torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[64.0, -127.0, 32.0, 0.0], [0.0] * 4]
    assert scales.flatten().tolist() == [pytest.approx(2 / 127), 0.0]


def test_a_model_in_integers_is_near_the_exact_one(converted, ids):
    with torch.inference_mode():
        exact, integers = (
            hf.from_pretrained(converted["kt-amx int8, two nodes"], activations=a, dtype=torch.float32)(ids).logits
            for a in ("exact", "int8")
        )
    error = float((integers - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05
