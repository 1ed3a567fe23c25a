"""Dequantisers take no more memory than they say, and say little."""

import tracemalloc

import numpy as np
import pytest
from checkpoints import BF16, F8
from ktforge_plugins import MoeToBf16
from preprocess.units import fused_unit, weight_unit

from ktforge.contract.tensors import DTYPES

N, K = 1024, 2048
I8, U8, I32, F16, F32 = np.int8, np.uint8, np.int32, np.float16, np.float32


def compressed(bits, symmetric=True):
    weights = {"num_bits": bits, "type": "int", "group_size": 32, "strategy": "group", "symmetric": symmetric}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


#: A form → one projection [N, K] that is stored so, and its quantization_config.
FORMS = {
    "fp8": ({"weight": ((N, K), F8), "weight_scale_inv": ((N // 128, K // 128), F32)}, {}),
    "e5m2": ({"weight": ((N, K), DTYPES["F8_E5M2"]), "weight_scale": ((N, 1), BF16)}, {}),
    "mxfp8": ({"weight": ((N, K), F8), "weight_scale_inv": ((N, K // 32), U8)}, {}),
    "mxfp4": ({"weight": ((N, K // 2), I8), "scale": ((N, K // 32), DTYPES["F8_E8M0"])}, {}),
    "blocks": ({"blocks": ((N, K // 32, 16), U8), "scales": ((N, K // 32), U8)}, {}),
    "nvfp4": (
        {"weight_packed": ((N, K // 2), U8), "weight_scale": ((N, K // 16), F8), "weight_scale_2": ((1,), F32)}, {},
    ),
    "packed int4": ({"weight_packed": ((N, K // 8), I32), "weight_scale": ((N, K // 32), BF16)}, compressed(4)),
    "packed int8": ({"weight_packed": ((N, K // 4), I32), "weight_scale": ((N, K // 32), BF16)}, compressed(8)),
    "asymmetric": (
        {"weight_packed": ((N, K // 8), I32), "weight_scale": ((N, K // 32), BF16),
         "weight_zero_point": ((N // 8, K // 32), I32)}, compressed(4, symmetric=False),
    ),
    "ordered": (
        {"weight_packed": ((N, K // 8), I32), "weight_scale": ((N, K // 32), BF16), "weight_g_idx": ((K,), I32)},
        compressed(4),
    ),
    "int8": ({"weight": ((N, K), I8), "weight_scale": ((N, K // 32), BF16)}, compressed(8)),
    "gptq": (
        {"qweight": ((K // 8, N), I32), "qzeros": ((K // 32, N // 8), I32), "scales": ((K // 32, N), F16),
         "g_idx": ((K,), I32)}, {"quant_method": "gptq"},
    ),
    "awq": (
        {"qweight": ((K, N // 8), I32), "qzeros": ((K // 32, N // 8), I32), "scales": ((K // 32, N), F16)},
        {"quant_method": "awq"},
    ),
}  # fmt: skip


def peak(stage, unit):
    """Bytes at the worst moment of making a unit, those of the result left out."""
    tracemalloc.start()
    (result,) = stage.apply(unit)
    made = [result.tensors[role] for role in result.spec.tensors]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most - sum(a.nbytes for a in made)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", [0, 2])
def test_no_more_than_it_says(form, experts):
    stored, quantization = FORMS[form]
    arrays = {p: np.zeros(((experts,) if experts else ()) + shape, dtype) for p, (shape, dtype) in stored.items()}
    unit = fused_unit({f"down.{p}": a for p, a in arrays.items()}) if experts else weight_unit(arrays)
    stage = MoeToBf16().bind({"quantization_config": quantization})
    said = stage.scratch_bytes(unit.spec)
    assert peak(stage, unit) <= said + 100_000  # Python's own objects
    bf16 = 2 * N * K
    assert said <= (3 if experts else 2) * bf16 + 100_000


def test_plain_weights_need_nothing():
    assert MoeToBf16().scratch_bytes(weight_unit({"weight": np.zeros((N, K), F32)}).spec) == 0
