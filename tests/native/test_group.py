"""Group-wise quantisation, nibble packing and unpacking against NumPy, for every instruction set of this CPU."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ktforge import native
from ktforge.contract.tensors import BF16


def weights(n, k, seed, spread):
    random = np.random.default_rng(seed)
    magnitude = np.float32(10.0) ** random.uniform(-spread, min(spread, 36), (n, 1)).astype(np.float32)
    return ((random.standard_normal((n, k), np.float32) + random.choice([0, 3])) * magnitude).astype(BF16)


def quantise(weight, bits, size, symmetric, bf16_scales, narrow=False):
    shape = (weight.shape[0], -(-weight.shape[1] // size))
    codes, scales, zeros = np.empty(weight.shape, np.int8), np.empty(shape, np.float32), np.empty(shape, np.int8)
    native.group(weight, bits, size, bf16_scales, codes, scales, None if symmetric else zeros, narrow=narrow)
    return codes, scales, np.zeros(shape, np.int8) if symmetric else zeros


def everywhere(function):
    """The result of ``function`` under each instruction set, by name."""
    before, results = native.current_isa(), {}
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            results[name] = function()
    native.use_isa(before)
    return results


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 9), k=st.integers(1, 150), size=st.integers(1, 160), seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 3, 45]), bits=st.sampled_from([4, 8]), bf16=st.booleans(),
    rule=st.sampled_from(["symmetric", "asymmetric", "narrow"]),
)  # fmt: skip
def test_group_equals_numpy(n, k, size, seed, spread, bits, bf16, rule):
    symmetric, narrow = rule != "asymmetric", rule == "narrow"
    weight = weights(n, k, seed, spread)
    weight[seed % n, : k // 2] = 0
    want = reference.quantise_groups(weight, bits, size, symmetric, bf16, narrow)
    for name, got in everywhere(lambda: quantise(weight, bits, size, symmetric, bf16, narrow)).items():
        for ours, theirs in zip(got, want, strict=True):
            assert np.array_equal(ours, theirs), name


@pytest.mark.parametrize(("bits", "most"), [(4, 7), (8, 127)])
def test_narrow_codes_leave_out_the_lowest(isa, bits, most):
    """Whatever the largest weight of a group is, and whichever way bf16 rounds its scale."""
    magnitudes = np.arange(1, 0x7F80, dtype=np.uint16)[:, None]
    weight = np.repeat(np.hstack([magnitudes, magnitudes | 0x8000]), 40, axis=1).view(BF16)
    codes, scales, _ = quantise(weight, bits, 80, True, True, narrow=True)
    assert codes.min() == -most and np.array_equal(codes[:, :40], -codes[:, 40:])
    normal = scales[:, 0] >= np.finfo(np.float32).tiny  # bf16 has its exponents
    assert (codes[normal, :40] == most).all()
    off = np.abs(scales[normal, 0].astype(np.float64) * most / weight[normal, 0].astype(np.float64) - 1)
    assert off.max() <= 2.0**-8


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "bound"), [(4, 0.51), (8, 0.51)])
def test_no_weight_is_further_from_its_code_than_half_a_step(isa, bits, bound, symmetric):
    weight = weights(16, 256, 3, 1)
    codes, scales, zeros = quantise(weight, bits, 32, symmetric, bf16_scales=False)
    steps = np.repeat(scales, 32, axis=1).astype(np.float64)
    restored = (codes.astype(np.float64) - np.repeat(zeros, 32, axis=1)) * steps
    error = np.abs(restored - weight.astype(np.float64)) / steps
    # A zero point is rounded too, so an extreme may lie another half step outside.
    assert error.max() <= (bound if symmetric else 2 * bound)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 31), (3, 40), (5, 98)])
def test_a_weight_that_is_not_finite_is_found(isa, place, value):
    weight = weights(6, 99, 1, 1)
    weight[place] = value
    with pytest.raises(native.NotFinite) as caught:
        quantise(weight, 4, 33, True, True)
    assert (caught.value.row, caught.value.col) == place


@given(count=st.integers(0, 300), seed=st.integers(0, 1000))
@settings(deadline=None)
def test_nibbles(count, seed):
    codes = np.random.default_rng(seed).integers(-8, 8, 2 * count, np.int8)
    unsigned = (codes.astype(np.int32) + 8).astype(np.uint8)
    want = unsigned[::2] | unsigned[1::2] << 4

    def round_trip():
        out = np.empty(count, np.uint8)
        native.nibbles_pack(codes, out)
        return out, native.nibbles_unpack(out, codes.shape)

    for name, (packed, unpacked) in everywhere(round_trip).items():
        assert np.array_equal(packed, want) and np.array_equal(unpacked, codes), name


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), k=st.integers(1, 60), seed=st.integers(0, 2**32), bits=st.sampled_from([8, 4]))
def test_kt_amx_unpack_undoes_pack(n, k, seed, bits):
    shape = (32 * n, k * (64 if bits == 8 else 128))
    top = 1 << (bits - 1)
    codes = np.random.default_rng(seed).integers(-top, top, shape, np.int8)
    packed = reference.pack(codes, bits)
    for name, got in everywhere(lambda: native.kt_amx_unpack(packed, shape, bits)).items():
        assert np.array_equal(got, codes), name


def test_arrays_that_do_not_fit_are_refused():
    weight, codes = weights(4, 64, 0, 1), np.empty((4, 64), np.int8)
    with pytest.raises(ValueError, match=r"scales must be contiguous float32 \[4, 2\]"):
        native.group(weight, 4, 32, True, codes, np.empty((4, 1), np.float32))
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        native.group(weight, 3, 32, True, codes, np.empty((4, 2), np.float32))
    with pytest.raises(ValueError, match="narrow codes have no zero points"):
        native.group(weight, 4, 64, True, codes, np.empty((4, 1), np.float32), np.empty((4, 1), np.int8), narrow=True)
    with pytest.raises(ValueError, match="one byte for two codes"):
        native.nibbles_pack(codes, np.empty(100, np.uint8))
    with pytest.raises(ValueError, match="one byte for two codes"):
        native.nibbles_unpack(np.empty(3, np.uint8), (4,))
    with pytest.raises(ValueError, match="does not divide into tiles"):
        native.kt_amx_unpack(np.empty(16 * 64, np.int8), (16, 64), 8)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_zero_point_is_above_the_highest_code(isa, bits):
    """Where bf16 rounds a scale down, the largest negative weight is more than all steps away."""
    weight = np.repeat(np.arange(0x0080, 0x7F80, dtype=np.uint16)[:, None] | 0x8000, 32, axis=1).view(BF16)
    got, want = quantise(weight, bits, 32, False, True), reference.quantise_groups(weight, bits, 32, False, True, False)
    assert got[2].max() == (1 << (bits - 1)) - 1
    for ours, theirs in zip(got, want, strict=True):
        assert np.array_equal(ours, theirs)
