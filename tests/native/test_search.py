"""Scales that are searched against NumPy, for every instruction set of this CPU."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from native.test_group import everywhere, weights

from ktforge import native
from ktforge.contract.tensors import BF16

FACTORS = np.linspace(0.4, 1, 16, dtype=np.float32)


def search(weight, bits, size, factors=FACTORS, given=None, step=1, bf16=False):
    codes = np.empty(weight.shape, np.int8)
    scales = np.empty((weight.shape[0], -(-weight.shape[1] // size)), np.float32)
    native.search(weight, bits, size, factors, given, codes, scales, step=step, bf16_scales=bf16)
    return codes, scales


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 4), k=st.one_of(st.integers(1, 100), st.integers(250, 400)),
    size=st.one_of(st.integers(1, 110), st.integers(250, 400)), seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 3, 45]), bits=st.sampled_from([4, 8]), bf16=st.booleans(),
    step=st.sampled_from([1, 16]), count=st.integers(1, 40), rule=st.sampled_from(["own", "given", "some are 0"]),
)  # fmt: skip
def test_search_equals_numpy(n, k, size, seed, spread, bits, bf16, step, count, rule):
    weight = weights(n, k, seed, spread)
    weight[seed % n, : k // 2] = 0
    random = np.random.default_rng(seed)
    factors = np.linspace(0.25, 1.02, count, dtype=np.float32)
    given = None if rule == "own" else random.random(k, np.float32) ** 8
    if rule == "some are 0":
        given[random.random(k) < 0.7] = 0
    want = reference.search(weight, bits, size, factors, given, step, bf16)
    for name, got in everywhere(lambda: search(weight, bits, size, factors, given, step, bf16)).items():
        for ours, theirs in zip(got, want, strict=True):
            assert np.array_equal(ours, theirs), name


def test_a_long_row_equals_numpy(isa):
    """More than a block of candidates and a row of DeepSeek's size."""
    weight, given = weights(2, 7168, 1, 1), np.random.default_rng(0).random(7168, np.float32)
    factors = np.linspace(0.25, 1.02, 64, dtype=np.float32)
    for ours, theirs in zip(
        search(weight, 4, 7168, factors, given, 16), reference.search(weight, 4, 7168, factors, given, 16, False),
        strict=True,
    ):  # fmt: skip
        assert np.array_equal(ours, theirs)


def test_the_weighted_error_is_less_than_that_of_the_largest_weight(isa):
    """On weights with outliers, for the errors that it is asked for, and at least as small as every candidate's."""
    random = np.random.default_rng(0)
    weight = (random.standard_t(4, (32, 512)) * 0.02).astype(BF16)
    given = (random.random(512) ** 4).astype(np.float32)
    w = weight.astype(np.float64)

    def error(codes, scales, h):
        return (h * (w - codes * scales.astype(np.float64)) ** 2).sum(axis=1)

    for weights_of, h in ((None, np.abs(w)), (given, given.astype(np.float64))):
        found = error(*search(weight, 4, 512, given=weights_of), h)
        for factor in FACTORS:
            scale = factor * np.abs(w).max(axis=1, keepdims=True) / 7
            plain = error(np.clip(np.rint(w / scale), -7, 7), scale, h)
            assert (found <= plain * (1 + 1e-4)).all()
        assert found.sum() < 0.9 * plain.sum()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_found(isa, value):
    weight = weights(6, 99, 1, 1)
    weight[5, 98] = value
    with pytest.raises(native.NotFinite) as caught:
        search(weight, 4, 33)
    assert (caught.value.row, caught.value.col) == (5, 98)


def test_codes_leave_out_the_lowest(isa):
    codes, scales = search(rows := weights(64, 96, 2, 45), 4, 32, bf16=True)
    assert codes.min() == -7 and codes.max() == 7
    assert np.array_equal(search(-rows, 4, 32, bf16=True)[0], -codes)
    assert np.array_equal(scales, scales.astype(BF16).astype(np.float32))


def test_arrays_that_do_not_fit_are_refused():
    weight = weights(4, 64, 0, 1)
    with pytest.raises(ValueError, match=r"weights must be contiguous float32 \[k\]"):
        search(weight, 4, 64, given=np.ones(63, np.float32))
    with pytest.raises(ValueError, match="factors must be float32"):
        search(weight, 4, 64, factors=np.ones(0, np.float32))
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        search(weight, 3, 64)
