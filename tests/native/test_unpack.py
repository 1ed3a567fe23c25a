"""Codes of 4 bits to bf16: every instruction set gives the bits of the formula."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktforge import native

BF16 = np.dtype(ml_dtypes.bfloat16)
INT4 = np.arange(-8, 8, dtype=np.float32)


def expected(codes, values, scale, columns):
    numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    spread = np.repeat(scale, columns, axis=1)[:, : numbers.shape[1]]
    return (values[numbers] * spread).astype(BF16)


@pytest.mark.parametrize("columns", [2, 14, 16, 30, 32, 34, 64, 66, 128, 200])
@pytest.mark.parametrize("k", [2, 16, 30, 32, 62, 64, 96, 130, 256])
def test_block_edges(isa, columns, k):
    random = np.random.default_rng(k)
    codes = random.integers(0, 256, (5, k // 2), np.uint8)
    values = random.standard_normal(16).astype(np.float32)
    scale = random.standard_normal((5, -(-k // columns))).astype(np.float32)
    got = native.nibbles_to_bf16(codes, values, scale, columns)
    assert got.tobytes() == expected(codes, values, scale, columns).tobytes()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 80), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_instruction_sets_agree(n, half_k, half_columns, seed):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (n, half_k), np.uint8)
    groups = -(-half_k // half_columns)
    scale = random.integers(0, 2**32, (n, groups), np.uint32).view(np.float32)
    scale = np.where(np.isnan(scale), np.float32(1), scale)
    before, results = native.current_isa(), []
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            results.append(native.nibbles_to_bf16(codes, INT4, scale, 2 * half_columns).tobytes())
    native.use_isa(before)
    assert len(set(results)) == 1


@pytest.mark.parametrize(
    ("codes", "values", "scale", "columns"),
    [
        (np.zeros((2, 8), np.int8), INT4, np.ones((2, 1), np.float32), 16),
        (np.zeros((2, 8), np.uint8)[:, ::2], INT4, np.ones((2, 1), np.float32), 16),
        (np.zeros((2, 8), np.uint8), INT4[:8], np.ones((2, 1), np.float32), 16),
        (np.zeros((2, 8), np.uint8), INT4, np.ones((2, 2), np.float32), 16),
        (np.zeros((2, 8), np.uint8), INT4, np.ones((2, 1), np.float64), 16),
        (np.zeros((2, 8), np.uint8), INT4, np.ones((2, 16), np.float32), 1),
    ],
)
def test_arrays_that_do_not_fit(codes, values, scale, columns):
    with pytest.raises(ValueError):
        native.nibbles_to_bf16(codes, values, scale, columns)
