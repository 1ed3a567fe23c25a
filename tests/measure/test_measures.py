"""Measures and counts of codes are NumPy's, add up over pieces, and say what is wrong with scales."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktforge import QuantPart, QuantSpec, UnitSpec
from ktforge.contract.tensors import BF16, F32
from ktforge.measure import codes, weights
from ktforge.measure.codes import Codes
from ktforge.measure.weights import Measures


def pair(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    one = random.standard_normal(shape, np.float32)
    return one.astype(dtype), (one + 0.1 * random.standard_normal(shape, np.float32)).astype(dtype)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, F32), (np.dtype(np.float16), BF16)])
def test_the_formulas(dtypes):
    original, converted = (a.astype(d) for a, d in zip(pair((30, 40), F32), dtypes, strict=True))
    found = Measures.of(original, converted)
    x, y = original.astype(np.float64).ravel(), converted.astype(np.float64).ravel()
    error = np.linalg.norm(x - y) / np.linalg.norm(x)
    assert math.isclose(found.relative_error, error, rel_tol=1e-12)
    assert math.isclose(found.sqnr, 10 * np.log10((x @ x) / ((x - y) @ (x - y))), rel_tol=1e-9)
    assert math.isclose(found.cosine, x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel_tol=1e-12)
    assert found.largest == np.abs(x - y).max() and found.weights == x.size and found.finite


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 50))
def test_pieces_add_up(rows, columns, cut):
    original, converted = pair((rows, columns), F32, rows)
    cut = min(cut, rows)
    whole = Measures.of(original, converted)
    total = Measures.of(original[:cut], converted[:cut]) + Measures.of(original[cut:], converted[cut:])
    assert total.weights == whole.weights and total.largest == whole.largest
    assert math.isclose(total.square, whole.square, rel_tol=1e-9)


def test_bands_add_up(monkeypatch):
    original, converted = pair((7, 30), F32)
    whole = Measures.of(original, converted)
    monkeypatch.setattr(weights, "BAND", 16)
    assert math.isclose(Measures.of(original, converted).product, whole.product, rel_tol=1e-12)


def test_what_has_no_norm():
    nothing, something = np.zeros(4, BF16), np.ones(4, BF16)
    same = Measures.of(nothing, nothing)
    assert (same.relative_error, same.sqnr, same.cosine) == (0, math.inf, 1)
    made = Measures.of(nothing, something)
    assert (made.relative_error, made.sqnr, made.cosine) == (math.inf, -math.inf, 0)
    lost = Measures.of(something, nothing)
    assert (lost.relative_error, lost.sqnr, lost.cosine) == (1, 0, 0)
    broken = Measures.of(np.array([1, np.nan], F32), np.ones(2, F32))
    assert not broken.finite


def spec(bits, group_size=None, symmetric=True):
    return QuantSpec(UnitSpec("x", {}, None), (), bits, "test/1", group_size, symmetric)


def test_codes_are_counted(monkeypatch):
    monkeypatch.setattr(codes, "BAND", 5)
    part = QuantPart(np.array([[-8, -7, 0, 7], [0, 0, 6, -6], [1, 2, 3, 7]], np.int8), np.ones((3, 1), np.float32))
    assert Codes.of(spec(4), part) == Codes(codes=12, zero=3, ends=4, lowest=1, scales=3)
    assert Codes.of(spec(8), part) == Codes(codes=12, zero=3, ends=0, lowest=0, scales=3)
    part = QuantPart(np.array([[-128, -127, 127, 126]], np.int8), np.ones((1, 2), np.float32))
    assert Codes.of(spec(8, 2), part) == Codes(codes=4, zero=0, ends=3, lowest=1, scales=2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scales_that_are_wrong(dtype):
    values = np.zeros((3, 4), np.int8)
    values[1, 2] = 3
    scales = np.array([[np.nan, 1], [1, 0], [-1, 0]], dtype)
    found = Codes.of(spec(4, 2), QuantPart(values, scales))
    assert (found.scales, found.not_finite, found.negative, found.lost) == (6, 1, 1, 1)


def test_a_scale_of_zero_for_zero_points_alone():
    zeros = np.array([[-8], [-8]], np.int8)
    part = QuantPart(np.array([[-8, -8], [-8, -7]], np.int8), np.zeros((2, 1), np.float32), zeros)
    assert Codes.of(spec(4, None, False), part).lost == 1


def test_counts_add_up():
    one = Codes(10, 1, 2, 3, 4, 5, 6, 7)
    assert one + Codes(1, 1, 1, 1, 1, 1, 1, 1) == Codes(11, 2, 3, 4, 5, 6, 7, 8)
