"""Units with random weights, whose rows and columns differ, so that a transposition shows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ktforge.contract.tensors import BF16, PROJECTIONS, TensorSpec, Unit, UnitSpec


def expert(shape: tuple[int, int] = (256, 128), seed: int = 0, layer: int = 0, number: int = 0) -> Unit:
    """An expert with random BF16 weights. ``shape`` is (expert size, hidden size)."""
    random = np.random.default_rng(seed)
    arrays = {f"{p}.weight": _weights(random, s) for p, s in _shapes(shape).items()}
    name = f"model.layers.{layer}.mlp.experts.{number}"
    return _unit(name, {role: f"{name}.{role}" for role in arrays}, arrays, layer, number)


def fused_experts(shape: tuple[int, int] = (256, 128), experts: int = 3, seed: int = 0, layer: int = 0) -> Unit:
    """A layer's experts as one unit: BF16 ``gate_up.weight`` [E, 2I, H] and ``down.weight`` [E, H, I]."""
    random = np.random.default_rng(seed)
    size, hidden = shape
    shapes = {"gate_up": (experts, 2 * size, hidden), "down": (experts, hidden, size)}
    arrays = {f"{p}.weight": _weights(random, s) for p, s in shapes.items()}
    name = f"model.layers.{layer}.mlp.experts"
    return _unit(name, {f"{p}.weight": f"{name}.{p}_proj" for p in shapes}, arrays, layer, None, fused=True)


def weight_unit(
    arrays: Mapping[str, np.ndarray], name: str = "model.layers.0.self_attn.q_proj", layer: int | None = 0
) -> Unit:
    """A weight that is no expert's, stored as the parameters ``arrays``: ``{"weight": …, "weight_scale": …}``."""
    return _unit(name, {p: f"{name}.{p}" for p in arrays}, arrays, layer, None)


def _shapes(shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
    size, hidden = shape
    return {p: (hidden, size) if p == "down" else (size, hidden) for p in PROJECTIONS}


def _weights(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (random.standard_normal(shape) * 0.05).astype(BF16)


def _unit(
    name: str,
    names: Mapping[str, str],
    arrays: Mapping[str, np.ndarray],
    layer: int | None,
    number: int | None,
    *,
    fused: bool = False,
) -> Unit:
    specs = {role: TensorSpec(names[role], a.dtype, a.shape) for role, a in arrays.items()}
    return Unit(UnitSpec(name, specs, layer, number, fused), dict(arrays))
