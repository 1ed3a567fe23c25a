"""Conversions to bf16 against torch, for every instruction set of this CPU."""

import ml_dtypes
import numpy as np
import pytest
import torch

from ktforge import native


def torch_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits; for a NaN only that both are one, since torch's own paths differ in its payload."""
    bits = ours.view(np.uint16)
    nan = (theirs & 0x7FFF) > 0x7F80
    assert np.array_equal((bits & 0x7FFF) > 0x7F80, nan)
    assert np.array_equal(bits[~nan], theirs[~nan])


def test_every_float16(isa):
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    same(native.to_bf16(values), torch_bits(torch.from_numpy(values)))


@pytest.mark.parametrize("seed", range(4))
def test_float32_bit_patterns(isa, seed):
    random = np.random.default_rng(seed)
    values = random.integers(0, 1 << 32, 100_003, np.uint32)
    # Halves between two bf16 values decide how ties are rounded.
    values[::3] = (values[::3] & 0xFFFF0000) | 0x8000
    values = values.view(np.float32)
    same(native.to_bf16(values), torch_bits(torch.from_numpy(values)))


@pytest.mark.parametrize("scale", [1.0, 0.0, 3.1e-3, -7.77e-5, 1e-38, 3e38, 2.0**-133, np.inf])
def test_every_fp8(isa, scale):
    bits = np.arange(256, dtype=np.uint8).reshape(8, 32)
    scales = np.full((1, 1), scale, np.float32)
    ours = native.fp8_to_bf16(bits.view(ml_dtypes.float8_e4m3fn), scales, (8, 32))
    theirs = torch.from_numpy(bits).view(torch.float8_e4m3fn).float() * torch.tensor(scale, dtype=torch.float32)
    same(ours, torch_bits(theirs))


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 256), (128, 128)), ((300, 200), (128, 128)), ((7, 5), (3, 2)), ((1, 1), (128, 128)), ((65, 130), (1, 64)),
     ((33, 47), (32, 16)), ((16, 100), (16, 1))],
)  # fmt: skip
def test_fp8_blocks(isa, shape, block):
    random = np.random.default_rng(1)
    weight = (random.standard_normal(shape) * 50).astype(ml_dtypes.float8_e4m3fn)
    scales = random.random((-(-shape[0] // block[0]), -(-shape[1] // block[1])), np.float32)
    spread = torch.from_numpy(scales).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    fp8 = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    theirs = torch_bits(fp8.float() * spread[: shape[0], : shape[1]])
    assert np.array_equal(native.fp8_to_bf16(weight, scales, block).view(np.uint16), theirs)


def test_instruction_sets_agree_on_nan():
    nans = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF] * 11, np.uint32).view(np.float32)
    results = set()
    for name, supported in native.isas().items():
        if supported:
            native.use_isa(name)
            results.add(native.to_bf16(nans).tobytes())
    assert len(results) == 1


def test_arrays_that_do_not_fit_are_refused():
    fp8 = np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match="neither float16 nor float32"):
        native.to_bf16(np.zeros(3, np.float64))
    with pytest.raises(ValueError, match=r"scale must be contiguous float32 \[2, 2\]"):
        native.fp8_to_bf16(fp8, np.zeros((2, 1), np.float32), (2, 2))
    with pytest.raises(ValueError, match="must not be empty"):
        native.fp8_to_bf16(fp8, np.zeros((2, 2), np.float32), (0, 2))


@pytest.mark.parametrize("power", [-149, -126, -118, -101, -100, -99, 99, 100, 101, 118, 127])
def test_fp8_scales_at_the_ends_of_what_a_table_holds(isa, power):
    """Products of every byte with the scales just below, at and above each bound."""
    weight = np.tile(np.arange(256, dtype=np.uint8), 2)[None].view(ml_dtypes.float8_e4m3fn)
    middle = np.float32(2.0**power)
    for scale in (np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))):
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = (weight.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
        got = native.fp8_to_bf16(weight, np.full((1, 4), scale, np.float32), (1, 128))
        numbers = ~np.isnan(wanted.astype(np.float32))
        assert np.array_equal(got.view(np.uint16)[numbers], wanted.view(np.uint16)[numbers])
        assert np.isnan(got.astype(np.float32)[~numbers]).all()
