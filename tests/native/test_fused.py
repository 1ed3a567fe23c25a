"""Quantising and packing in one pass gives the bytes of doing one after the other, on every instruction set."""

import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ktforge import native
from ktforge.contract.tensors import Part

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def fused(weight, part, bits):
    n, k = part.shape
    out, scales = np.empty(n * k * bits // 8, np.int8), np.empty(n, np.float32)
    native.absmax_kt_amx(weight, part, bits, out, scales)
    return out.tobytes(), scales.tobytes()


def expected(weight, bits):
    codes, scales = reference.quantise(np.ascontiguousarray(weight), bits)
    return reference.pack(codes, bits).tobytes(), scales.astype(np.float32).tobytes()


def on_every_isa(weight, part, bits, want):
    before = native.current_isa()
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            assert fused(weight, part, bits) == want, name
    native.use_isa(before)


def whole(weight):
    return Part("up", 0, (0, weight.shape[0]), (0, weight.shape[1]))


@st.composite
def parts(draw):
    """Bits, a part, and the shape of the matrix it is cut from; some are wider than the 3,584-column block."""
    bits = draw(st.sampled_from([8, 4]))
    n = 32 * draw(st.integers(1, 9))
    k = (64 if bits == 8 else 128) * draw(st.one_of(st.integers(1, 9), st.integers(54, 60)))
    row, col = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    shape = n + row + draw(st.integers(0, 3)), k + col + draw(st.integers(0, 3))
    return bits, Part("up", 0, (row, row + n), (col, col + k)), shape


@settings(max_examples=40, deadline=None)
@given(case=parts(), seed=st.integers(0, 2**32), spread=st.sampled_from([0, 3, 45]))
def test_bf16(case, seed, spread):
    bits, part, shape = case
    random = np.random.default_rng(seed)
    # Rows of very different magnitudes; with a spread of 45 some are too small for a finite inverse scale.
    magnitude = np.float32(10.0) ** random.uniform(-spread, min(spread, 36), (shape[0], 1)).astype(np.float32)
    weight = (random.standard_normal(shape, np.float32) * magnitude).astype(BF16)
    weight[part.rows[0] + seed % 32] = -0.0 if seed % 2 else 0.0
    on_every_isa(weight, part, bits, expected(part.of(weight), bits))


def dequantised(codes, scale, block):
    spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return (codes.astype(np.float32) * spread).astype(BF16)


@settings(max_examples=40, deadline=None)
@given(
    case=parts(), seed=st.integers(0, 2**32),
    block=st.sampled_from([(128, 128), (16, 32), (50, 70), (1, 1000), (7, 1)]),
    exponent=st.sampled_from([-9, -30, -38, 20]),
)  # fmt: skip
def test_fp8(case, seed, block, exponent):
    bits, part, shape = case
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, shape, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[part.rows[0] + seed % 32] = 0x80 if seed % 2 else 0  # a row of zeros
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    scale = ((random.random(grid, np.float32) + 0.5) * np.float32(10.0) ** exponent).astype(np.float32)
    scale[0] *= -1
    weight = native.Fp8Blocks(codes.view(F8), scale, block)
    on_every_isa(weight, part, bits, expected(part.of(dequantised(codes.view(F8), scale, block)), bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", [(0, 0), (15, 31), (16, 32), (63, 447)])
def test_a_weight_that_is_not_finite_is_found(isa, bits, place):
    weight = np.ones((80, 500), BF16)
    part = Part("up", 0, (3, 67), (5, 453 if bits == 8 else 389))
    row, col = place[0], min(place[1], part.shape[1] - 1)
    weight[3 + row, 5 + col] = np.inf
    weight[2], weight[:, 4], weight[67:] = np.nan, np.nan, np.nan  # outside the part
    with pytest.raises(native.NotFinite) as caught:
        fused(weight, part, bits)
    assert (caught.value.row, caught.value.col) == (row, col)

    codes = np.full((80, 500), 0x38, np.uint8)
    codes[3 + row, 5 + col] = 0xFF
    codes[2], codes[:, 4], codes[67:] = 0x7F, 0x7F, 0x7F
    with pytest.raises(native.NotFinite) as caught:
        fused(native.Fp8Blocks(codes.view(F8), np.ones((3, 10), np.float32), (32, 50)), part, bits)
    assert (caught.value.row, caught.value.col) == (row, col)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_scale_that_makes_weights_infinite_is_found(isa, value):
    scale = np.ones((2, 2), np.float32)
    scale[1, 1] = value
    codes = np.full((64, 128), 0x40, np.uint8)
    codes[32:, 64:70] = 0x00  # 0 * 3e38 is finite
    weight = native.Fp8Blocks(codes.view(F8), scale, (32, 64))
    with pytest.raises(native.NotFinite) as caught:
        fused(weight, whole(weight), 8)
    assert (caught.value.row, caught.value.col) == (32, 70 if value == 3e38 else 64)


@pytest.mark.parametrize("scale", [2.0**-101, 2.0**-100, 2.0**-99, 2.0**99, 2.0**100, 2.0**101, -0.3])
def test_every_fp8_at_the_bounds_of_the_table(isa, scale):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = np.full((1, 1), scale, np.float32)
    want = dequantised(codes.view(F8), scales, (4, 64))
    assert native.fp8_to_bf16(codes.view(F8), scales, (4, 64)).tobytes() == want.tobytes()


def test_arrays_that_do_not_fit_are_refused():
    weight, out, scales = np.ones((64, 128), BF16), np.empty(64 * 128, np.int8), np.empty(64, np.float32)
    part = whole(weight)
    wrong = [
        (weight.astype(np.float32), part, 8, out, scales),
        (weight, part, 4, out, scales),
        (weight, part, 8, out, scales[:-1]),
        (weight, part, 5, out, scales),
        (np.asfortranarray(weight), part, 8, out, scales),
        (weight[:-1], part, 8, out, scales),
        (weight, Part("up", 0, (0, 16), (0, 128)), 8, out[: 16 * 128], scales[:16]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError):
            native.absmax_kt_amx(*arguments)
