"""Units from arrays, and what a preprocessor makes of them."""

import numpy as np

from ktforge import TensorSpec, Unit, UnitSpec

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
