"""Products, moments and codes with error feedback against NumPy, for every instruction set of this CPU."""

import numpy as np
import pytest
from entry_points import _inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from native.test_group import everywhere

from ktforge import native
from ktforge.contract.tensors import BF16


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 20), k=st.integers(1, 600), n=st.integers(1, 60), seed=st.integers(0, 1000))
def test_a_product_sums_in_order(m, k, n, seed):
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal(s, np.float32) for s in ((m, k), (k, n)))
    wanted = np.zeros((m, n), np.float32)
    for p in range(k):
        wanted += a[:, p : p + 1] * b[p]
    for name, got in everywhere(lambda: native.product(a, b)).items():
        assert np.array_equal(got, wanted), name
    assert np.array_equal(native.product(np.asfortranarray(a), b), wanted)


def test_second_moments_and_their_factor(isa):
    x = _inputs(700, 300)
    moments = native.second_moments(x)
    exact = x.astype(np.float64).T @ x.astype(np.float64) / len(x)
    assert np.array_equal(moments, moments.T)
    np.testing.assert_allclose(moments, exact, atol=1e-5 * np.abs(exact).max())
    damped = moments.astype(np.float64) + 0.01 * np.diag(moments).astype(np.float64).mean() * np.eye(300)
    factor = native.factor(moments, 0.01)
    wanted = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(factor, wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())
    assert not np.tril(factor, -1).any()


def test_what_is_no_second_moment():
    for moments in (np.zeros((3, 3)), -np.eye(3), np.full((3, 3), np.nan), np.array([[1, 2], [2, 1]])):
        with pytest.raises(ValueError, match="no second moments"):
            native.factor(np.ascontiguousarray(moments, np.float32), 0.01)


def stated(weight, factor, order, scales, size, most):
    """GPTQ, column by column in float32."""
    w = weight[:, order].astype(np.float32)
    codes = np.empty(w.shape, np.int8)
    for j, column in enumerate(order):
        scale = scales[:, column // size]
        q = np.clip(np.rint(w[:, j] * (np.float32(1) / scale)), -most, most)
        codes[:, column] = q
        w[:, j + 1 :] += -((w[:, j] - q * scale) / factor[j, j])[:, None] * factor[j, j + 1 :]
    return codes


@pytest.mark.parametrize(("n", "k", "size"), [(5, 96, 96), (33, 200, 200), (70, 128, 32), (4, 300, 150)])
@pytest.mark.parametrize(("bits", "most"), [(4, 7), (8, 127)])
def test_codes_are_those_of_gptq(isa, n, k, size, bits, most):
    random = np.random.default_rng(k)
    x = random.standard_normal((4 * k, k)) @ (np.eye(k) + random.standard_normal((k, k)) / k**0.5)
    moments = native.second_moments(np.ascontiguousarray(x, np.float32))
    order = np.argsort(-np.diag(moments), kind="stable").astype(np.uint32)
    factor = native.factor(np.ascontiguousarray(moments[order][:, order]), 0.01)
    weight = (random.standard_t(5, (n, k)) * 0.02).astype(BF16)
    scales = np.abs(weight.astype(np.float32)).reshape(n, -1, size).max(axis=2) / most
    codes = np.empty(weight.shape, np.int8)
    native.feedback(weight, bits, size, order, factor, scales, codes)
    assert np.array_equal(codes, stated(weight, factor, order, scales, size, most))

    def error(codes):
        off = weight.astype(np.float64) - codes * np.repeat(scales, size, axis=1).astype(np.float64)
        return np.einsum("ij,jk,ik->", off, moments.astype(np.float64), off)

    plain = np.clip(np.rint(weight.astype(np.float32) / np.repeat(scales, size, axis=1)), -most, most)
    assert error(codes) < 0.8 * error(plain)


def test_silu(isa):
    gate = np.linspace(-50, 50, 4001, dtype=np.float32)
    up = np.cos(gate)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(native.silu(gate, up), exact, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_found(isa, value):
    weight = np.ones((40, 99), BF16)
    weight[35, 98] = value
    factor, scales, codes = np.eye(99, dtype=np.float32), np.ones((40, 3), np.float32), np.empty((40, 99), np.int8)
    with pytest.raises(native.NotFinite) as caught:
        native.feedback(weight, 4, 33, np.arange(99, dtype=np.uint32), factor, scales, codes)
    assert (caught.value.row, caught.value.col) == (35, 98)


def test_arrays_that_do_not_fit_are_refused():
    weight, codes = np.ones((4, 8), BF16), np.empty((4, 8), np.int8)
    order, factor, scales = np.arange(8, dtype=np.uint32), np.eye(8, dtype=np.float32), np.ones((4, 1), np.float32)
    for changed, why in [
        ({"order": np.zeros(8, np.uint32)}, "order must name each column once"),
        ({"factor": np.eye(7, dtype=np.float32)}, r"factor must be contiguous float32 \[k, k\]"),
        ({"scales": np.ones((4, 2), np.float32)}, r"scales must be contiguous float32 \[4, 1\]"),
    ]:
        given = {"order": order, "factor": factor, "scales": scales, **changed}
        with pytest.raises(ValueError, match=why):
            native.feedback(weight, 4, 8, given["order"], given["factor"], given["scales"], codes)
