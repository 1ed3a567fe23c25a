"""Wider and higher than two blocks of every kind: columns of the layout, rows of it, columns of FP8 at a time."""

import ml_dtypes
import numpy as np
import pytest
import reference

from ktforge import native
from ktforge.contract.tensors import Part

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
#: Two blocks of 3,584 columns and a part of one that is no multiple of 256; two blocks of 64 or 128 rows and a part.
COLUMNS = 2 * 3584 + 384
ROWS = {8: 2 * 64 + 32, 4: 2 * 128 + 32}


def weight_of(bits):
    random = np.random.default_rng(bits)
    shape = ROWS[bits], COLUMNS
    return (random.standard_normal(shape, np.float32) * np.arange(1, shape[0] + 1, dtype=np.float32)[:, None]).astype(
        BF16
    )


def fused(weight, bits):
    n, k = weight.shape
    out, scales = np.empty(n * k * bits // 8, np.int8), np.empty(n, np.float32)
    native.absmax_kt_amx(weight, Part("up", 0, (0, n), (0, k)), bits, out, scales)
    return out.tobytes(), scales.tobytes()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_and_packed(isa, bits):
    weight = weight_of(bits)
    codes, scales = reference.quantise(weight, bits)
    packed = reference.pack(codes, bits)
    assert fused(weight, bits) == (packed.tobytes(), scales.tobytes())
    made = np.empty(packed.size, np.int8)
    native.kt_amx_pack(codes, bits, made)
    assert made.tobytes() == packed.tobytes()
    assert native.kt_amx_unpack(packed, codes.shape, bits).tobytes() == codes.tobytes()


@pytest.mark.parametrize("block", [(128, 128), (50, 70), (1, 5000)])
@pytest.mark.parametrize("bits", [8, 4])
def test_fp8(isa, bits, block):
    random = np.random.default_rng(bits)
    codes = random.integers(0, 0x7F, (ROWS[bits], COLUMNS), np.uint8).view(F8)
    grid = tuple(-(-n // b) for n, b in zip(codes.shape, block, strict=True))
    scale = (random.random(grid, np.float32) + 0.5).astype(np.float32)
    spread = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: codes.shape[0], : codes.shape[1]]
    plain = (codes.astype(np.float32) * spread).astype(BF16)
    wanted, scales = reference.quantise(plain, bits)
    assert fused(native.Fp8Blocks(codes, scale, block), bits) == (
        reference.pack(wanted, bits).tobytes(), scales.tobytes(),
    )  # fmt: skip
    assert native.fp8_to_bf16(codes, scale, block).tobytes() == plain.tobytes()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", [(40, 3584), (64, 7167), (159, 7551), (0, 0), (15, 3583)])
def test_a_weight_that_is_not_finite_is_found_in_any_of_them(isa, bits, place):
    weight = weight_of(bits)
    weight[place] = np.nan
    with pytest.raises(native.NotFinite) as caught:
        fused(weight, bits)
    assert (caught.value.row, caught.value.col) == place
    codes = np.full(weight.shape, 0x38, np.uint8)
    codes[place] = 0x7F
    with pytest.raises(native.NotFinite) as caught:
        fused(native.Fp8Blocks(codes.view(F8), np.ones((1, 2), np.float32), (512, 4096)), bits)
    assert (caught.value.row, caught.value.col) == place


@pytest.mark.parametrize("size", [32, 100, 3000])
@pytest.mark.parametrize("bits", [8, 4])
def test_groups(isa, bits, size):
    weight = weight_of(bits)[:40]
    shape = weight.shape[0], -(-COLUMNS // size)
    codes, scales, zeros = np.empty(weight.shape, np.int8), np.empty(shape, np.float32), np.empty(shape, np.int8)
    native.group(weight, bits, size, True, codes, scales, zeros)
    wanted = reference.quantise_groups(weight, bits, size, False)
    assert [a.tobytes() for a in (codes, scales, zeros)] == [a.tobytes() for a in wanted]


@pytest.mark.parametrize("columns", [32, 130, 3000])
def test_codes_of_4_bits(isa, columns):
    random = np.random.default_rng(columns)
    codes = random.integers(0, 256, (5, COLUMNS // 2), np.uint8)
    values = random.standard_normal(16).astype(np.float32)
    scale = (random.random((5, -(-COLUMNS // columns)), np.float32) + 0.5).astype(np.float32)
    plain = values[np.stack([codes & 15, codes >> 4], 2).reshape(5, COLUMNS)]
    wanted = (plain * np.repeat(scale, columns, 1)[:, :COLUMNS]).astype(BF16)
    assert native.nibbles_to_bf16(codes, values, scale, columns).tobytes() == wanted.tobytes()
