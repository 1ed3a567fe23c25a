"""What kernels that multiply by way of vpsignb make of codes: the reason why the lowest code is left out.

kt-kernel up to 0.7.0 holds a weight of 4 bits as the byte 16 * code, and multiplies by an instruction for unsigned
bytes with signed ones: so it takes activations without their sign, and gives that to the weights first.
"""

import numpy as np
import pytest
import reference

from ktforge import native
from ktforge.contract.tensors import BF16

GROUP = 32


def vpsignb(values: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """values, negated in 8 bits, which leaves -128 as it is, or 0, as ``signs`` are."""
    negated = (0 - values.view(np.uint8)).astype(np.uint8).view(np.int8)
    return np.where(signs < 0, negated, np.where(signs == 0, np.int8(0), values))


def by_signs(weights: np.ndarray, activations: np.ndarray) -> np.ndarray:
    """int32 products of int8 weights [n, k] with int8 activations [k] as such a kernel computes them."""
    signed = vpsignb(weights, np.broadcast_to(activations, weights.shape))
    return signed.astype(np.int32) @ np.abs(activations.astype(np.int32))


def products(weights: np.ndarray, activations: np.ndarray) -> np.ndarray:
    return weights.astype(np.int32) @ activations.astype(np.int32)


@pytest.fixture
def layer():
    """Weights [256, 1024] and the codes of a token."""
    random = np.random.default_rng(0)
    weight = (random.standard_normal((256, 1024)) * 0.05).astype(BF16)
    return weight, random.integers(-127, 128, 1024, np.int8)


def int4(weight, narrow):
    shape = (weight.shape[0], weight.shape[1] // GROUP)
    codes, scales = np.empty(weight.shape, np.int8), np.empty(shape, np.float32)
    native.group(weight, 4, GROUP, True, codes, scales, narrow=narrow)
    return codes, scales


def layer_error(codes, scales, activations):
    """How far outputs of such a kernel are from those of exact products, relative: a scale for each group."""
    total, off = np.zeros(len(codes)), np.zeros(len(codes))
    for g in range(scales.shape[1]):
        columns = slice(g * GROUP, (g + 1) * GROUP)
        weights = (16 * codes[:, columns].astype(np.int32)).astype(np.int8)
        exact = products(weights, activations[columns])
        total += scales[:, g] * exact
        off += scales[:, g] * (by_signs(weights, activations[columns]) - exact)
    return np.linalg.norm(off) / np.linalg.norm(total)


def test_narrow_codes_are_multiplied_exactly(isa, layer):
    weight, activations = layer
    assert layer_error(*int4(weight, True), activations) == 0


def test_a_lowest_code_is_not(isa, layer):
    weight, activations = layer
    codes, scales = int4(weight, False)
    lowest = codes == -8
    assert 0.001 < lowest.mean() < 0.02 and layer_error(codes, scales, activations) > 0.2
    assert layer_error(np.where(lowest, np.int8(-7), codes), scales, activations) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_kt_amx_codes_are_multiplied_exactly(isa, layer, bits):
    weight, activations = layer
    codes, _ = reference.quantise(weight, bits)
    weights = codes if bits == 8 else (16 * codes.astype(np.int32)).astype(np.int8)
    assert np.array_equal(by_signs(weights, activations), products(weights, activations))
