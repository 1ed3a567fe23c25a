"""Sums over two runs of weights: those of NumPy in the kernel's eight lanes, from every instruction set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktforge import native
from ktforge.contract.tensors import BF16

LANES = 8


def in_lanes(terms):
    """The sum of float64 ``terms``, every eighth of them first, one after the other."""
    padded = np.zeros((-(-len(terms) // LANES), LANES))
    padded.reshape(-1)[: len(terms)] = terms
    lanes = np.zeros(LANES)
    for row in padded:
        lanes += row
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def expected(first, second):
    x, y = first.astype(np.float64), second.astype(np.float64)
    apart = x - y
    sums = [in_lanes(terms) for terms in (x * x, y * y, x * y, apart * apart)]
    return native.Difference(*sums, float(np.max(np.abs(apart), initial=0.0)))


@given(count=st.integers(0, 300), seed=st.integers(0, 2**32 - 1))
def test_every_instruction_set_gives_numpys_sums(count, seed):
    random = np.random.default_rng(seed)
    scale = np.float32(2.0) ** random.integers(-60, 60)
    first, second = ((scale * random.standard_normal(count, np.float32)).astype(BF16) for _ in range(2))
    before, want = native.current_isa(), expected(first, second)
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            assert native.difference(first, second) == want
    native.use_isa(before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7, 8, 19])
def test_what_is_not_finite_is_in_no_finite_sum(isa, bad, place):
    weights = np.ones(20, BF16)
    broken = weights.copy()
    broken[place] = bad
    found = native.difference(weights, broken)
    assert found.first == 20 and not np.isfinite([found.second, found.product, found.square]).any()
    found = native.difference(broken, weights)
    assert found.second == 20 and not np.isfinite([found.first, found.product, found.square]).any()


def test_the_ends_of_bf16_do_not_overflow(isa):
    most = np.full(1000, 0x7F7F, np.uint16).view(BF16)
    found = native.difference(most, -most)
    assert found.square == 4 * found.first and found.product == -found.first and np.isfinite(found.square)
    assert found.largest == 2 * float(most[0])


def test_arrays_that_do_not_fit():
    one = np.ones((2, 3), BF16)
    with pytest.raises(ValueError, match="first must be contiguous bf16"):
        native.difference(one.T, one.T)
    with pytest.raises(ValueError, match="second must be contiguous bf16 of first's shape"):
        native.difference(one, np.ones((3, 2), BF16))
