"""Units from arrays, and what a preprocessor makes of them."""

import numpy as np
from checkpoints import BF16, F8

from ktforge import TensorSpec, Unit, UnitSpec
from ktforge.contract.tensors import DTYPES

I8, U8, I32, F16, F32 = np.int8, np.uint8, np.int32, np.float16, np.float32

EXPERT = "model.layers.0.mlp.experts.0"


def weight_unit(arrays: dict[str, np.ndarray], projection="gate") -> Unit:
    """One projection of an expert, stored as the parameters ``arrays``."""
    specs = {
        f"{projection}.{p}": TensorSpec(f"{EXPERT}.{projection}_proj.{p}", a.dtype, a.shape) for p, a in arrays.items()
    }
    return Unit(UnitSpec(EXPERT, specs, 0, 0), {f"{projection}.{p}": a for p, a in arrays.items()})


def fused_unit(arrays: dict[str, np.ndarray]) -> Unit:
    """Experts in one tensor each for the roles ``gate_up.weight`` and the like."""
    name = "model.layers.0.mlp.experts"
    names = {r: f"{name}.{r.replace('.weight', '_proj').replace('.', '_proj_')}" for r in arrays}
    specs = {r: TensorSpec(names[r], a.dtype, a.shape) for r, a in arrays.items()}
    return Unit(UnitSpec(name, specs, 0, fused=True), arrays)


def made(stage, unit: Unit, config=None) -> Unit:
    """What ``stage`` makes of ``unit``, checked against its plan."""
    bound = stage.bind(config or {})
    (planned,) = bound.plan(unit.spec)
    (result,) = bound.apply(unit)
    assert result.tensors.keys() == planned.tensors.keys()
    for role, spec in planned.tensors.items():
        assert (result.tensors[role].dtype, result.tensors[role].shape) == (spec.dtype, spec.shape), role
    return result


def weight(stage, arrays, config=None) -> np.ndarray:
    """The BF16 weight that ``stage`` makes of a projection."""
    result = made(stage, weight_unit(arrays), config)
    assert list(result.tensors) == ["gate.weight"]
    assert result.spec.tensors["gate.weight"].name == f"{EXPERT}.gate_proj.weight"
    return result.tensors["gate.weight"]


def stored_forms(n: int, k: int) -> dict[str, tuple[dict, dict]]:
    """A form → one projection [n, k] stored so, as parameter → (shape, dtype), and its quantization_config.

    ``n`` is a multiple of 8, ``k`` of 32.
    """
    return {
        "fp8": ({"weight": ((n, k), F8), "weight_scale_inv": ((-(-n // 128), -(-k // 128)), F32)}, {}),
        "e5m2": ({"weight": ((n, k), DTYPES["F8_E5M2"]), "weight_scale": ((n, 1), BF16)}, {}),
        "e5m2 blocks": ({"weight": ((n, k), DTYPES["F8_E5M2"]), "scale": ((n // 8, k // 32), F32)}, {}),
        "mxfp8": ({"weight": ((n, k), F8), "weight_scale_inv": ((n, k // 32), U8)}, {}),
        "mxfp4": ({"weight": ((n, k // 2), I8), "scale": ((n, k // 32), DTYPES["F8_E8M0"])}, {}),
        "blocks": ({"blocks": ((n, k // 32, 16), U8), "scales": ((n, k // 32), U8)}, {}),
        "nvfp4": (
            {"weight_packed": ((n, k // 2), U8), "weight_scale": ((n, k // 16), F8), "weight_scale_2": ((1,), F32)}, {},
        ),
        "packed int4": ({"weight_packed": ((n, k // 8), I32), "weight_scale": ((n, k // 32), BF16)}, _compressed(4)),
        "packed int8": ({"weight_packed": ((n, k // 4), I32), "weight_scale": ((n, k // 32), BF16)}, _compressed(8)),
        "asymmetric": (
            {"weight_packed": ((n, k // 8), I32), "weight_scale": ((n, k // 32), BF16),
             "weight_zero_point": ((n // 8, k // 32), I32)}, _compressed(4, symmetric=False),
        ),
        "ordered": (
            {"weight_packed": ((n, k // 8), I32), "weight_scale": ((n, k // 32), BF16), "weight_g_idx": ((k,), I32)},
            _compressed(4),
        ),
        "int8": ({"weight": ((n, k), I8), "weight_scale": ((n, k // 32), BF16)}, _compressed(8)),
        "asymmetric int8": (
            {"weight": ((n, k), I8), "weight_scale": ((n, k // 32), BF16), "weight_zero_point": ((n, k // 32), I8)},
            _compressed(8, symmetric=False),
        ),
        **{
            f"gptq of {bits} bits": (
                {"qweight": ((k * bits // 32, n), I32), "qzeros": ((k // 32, n * bits // 32), I32),
                 "scales": ((k // 32, n), F16)}, {"quant_method": "gptq"},
            ) for bits in (2, 8) if n * bits % 32 == 0
        },
        "gptq": (
            {"qweight": ((k // 8, n), I32), "qzeros": ((k // 32, n // 8), I32), "scales": ((k // 32, n), F16),
             "g_idx": ((k,), I32)}, {"quant_method": "gptq"},
        ),
        "awq": (
            {"qweight": ((k, n // 8), I32), "qzeros": ((k // 32, n // 8), I32), "scales": ((k // 32, n), F16)},
            {"quant_method": "awq"},
        ),
    }  # fmt: skip


def _compressed(bits, symmetric=True):
    weights = {"num_bits": bits, "type": "int", "group_size": 32, "strategy": "group", "symmetric": symmetric}
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
