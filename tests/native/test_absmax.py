"""The kernels against the golden files and against NumPy, for every instruction set of this CPU."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import reference
from golden_inputs import golden_input
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ktforge import native

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = load_file(GOLDEN / "amx_small.safetensors")
LARGE = json.loads((GOLDEN / "amx_large.json").read_text())["cases"]
BF16 = np.dtype(ml_dtypes.bfloat16)


def quantise(weight, bits):
    codes, scales = np.empty(weight.shape, np.int8), np.empty(weight.shape[0], np.float32)
    native.absmax(weight, bits, codes, scales)
    return codes, scales


def pack(codes, bits):
    out = np.empty(codes.size * bits // 8, np.int8)
    native.kt_amx_pack(codes, bits, out)
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", range(sum(name.endswith(".input") for name in SMALL)))
def test_golden_small(isa, case, bits):
    codes, scales = quantise(SMALL[f"case{case}.input"], bits)
    assert pack(codes, bits).tobytes() == SMALL[f"case{case}.int{bits}.weight"].tobytes()
    assert scales.tobytes() == SMALL[f"case{case}.int{bits}.scale"].tobytes()


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c['n']}x{c['k']}")
def test_golden_large(isa, case):
    weight = golden_input(case["seed"], case["n"], case["k"])
    assert hashlib.sha256(weight.tobytes()).hexdigest() == case["input_sha256"]
    for bits in (8, 4):
        codes, scales = quantise(weight, bits)
        want = case[f"int{bits}"]
        assert hashlib.sha256(pack(codes, bits)).hexdigest() == want["weight_sha256"]
        assert hashlib.sha256(scales).hexdigest() == want["scale_sha256"]


def rows(n, k, seed, spread):
    """bf16 rows of very different magnitudes, denormal and almost infinite ones among them."""
    random = np.random.default_rng(seed)
    magnitude = np.float32(10.0) ** random.uniform(-spread, min(spread, 36), (n, 1)).astype(np.float32)
    return (random.standard_normal((n, k), np.float32) * magnitude).astype(BF16)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 40), k=st.integers(1, 200), seed=st.integers(0, 2**32), spread=st.sampled_from([0, 3, 45]),
    bits=st.sampled_from([8, 4]),
)  # fmt: skip
def test_absmax_equals_numpy(n, k, seed, spread, bits):
    weight = rows(n, k, seed, spread)
    weight[seed % n] = -0.0 if seed % 2 else 0.0
    want_codes, want_scales = reference.quantise(weight, bits)
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            codes, scales = quantise(weight, bits)
            assert codes.tobytes() == want_codes.tobytes(), name
            assert scales.tobytes() == want_scales.tobytes(), name


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 60), seed=st.integers(0, 2**32), bits=st.sampled_from([8, 4]))
def test_pack_equals_numpy(n, k, seed, bits):
    # 60 * 64 and 60 * 128 columns cross the 3,584-column block.
    shape = (32 * n, k * (64 if bits == 8 else 128))
    top = 1 << (bits - 1)
    codes = np.random.default_rng(seed).integers(-top, top, shape, np.int8)
    want = reference.pack(codes, bits).tobytes()
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            assert pack(codes, bits).tobytes() == want, name


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (4, 7)])
def test_the_lowest_code_is_never_made(isa, bits, most):
    """Whatever the largest weight of a row is: upstream's kernels cannot negate -128, nor -8 of 4 bits."""
    magnitudes = np.arange(0x7F80, dtype=np.uint16)[:, None]
    weight = np.repeat(np.hstack([magnitudes, magnitudes | 0x8000]), 20, axis=1).view(BF16)
    codes, scales = quantise(weight, bits)
    assert scales[0] == 0 and not codes[0].any()
    assert (codes[1:, :20] == most).all() and (codes[1:, 20:] == -most).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_scale_of_minus_zeros_is_plus_zero(isa, bits):
    codes, scales = quantise(np.full((1, 64), -0.0, BF16), bits)
    assert scales.tobytes() == bytes(4) and not codes.any()


def test_a_column_range_is_read_in_place(isa):
    weight = rows(64, 512, 7, 1)
    for bits in (8, 4):
        part, copy = weight[:, 128:384], np.ascontiguousarray(weight[:, 128:384])
        assert all(np.array_equal(a, b) for a, b in zip(quantise(part, bits), quantise(copy, bits), strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 31), (3, 32), (5, 98)])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_that_is_not_finite_is_found(isa, bits, place, value):
    weight = rows(6, 99, 1, 1)
    weight[place] = value
    with pytest.raises(native.NotFinite) as caught:
        quantise(weight, bits)
    assert (caught.value.row, caught.value.col) == place


@pytest.mark.parametrize(("shape", "bits"), [((16, 128), 8), ((32, 96), 8), ((32, 64), 4), ((48, 128), 4)])
def test_sizes_that_do_not_divide_into_tiles(isa, shape, bits):
    with pytest.raises(ValueError, match="does not divide into tiles"):
        pack(np.zeros(shape, np.int8), bits)


def test_arrays_that_do_not_fit_are_refused():
    weight = rows(4, 64, 0, 1)
    codes, scales = np.empty((4, 64), np.int8), np.empty(4, np.float32)
    wrong = [
        (weight.astype(np.float32), 8, codes, scales),
        (weight, 8, codes[:3], scales),
        (weight, 8, codes, scales.astype(np.float64)),
        (weight, 8, np.asfortranarray(codes), scales),
        (weight[::-1], 8, codes, scales),
        (weight.T[:4, :4], 8, codes[:, :4].copy(), scales),
        (weight, 5, codes, scales),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            native.absmax(*arguments)
