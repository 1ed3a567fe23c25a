"""The check of a quantizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ktforge.contract.checks import delivered_parts, expected
from ktforge.contract.stages import Layout, Quantizer
from ktforge.contract.tensors import Demand, QuantPart, QuantSpec, QuantUnit, Unit, UnitSpec
from ktforge.errors import CheckpointError
from ktforge.testing.common import bound, check_plan_key, check_scratch, kept, peak_of, read_only
from ktforge.testing.units import expert


def check_quantizer(
    quantizer: Quantizer,
    layout: Layout,
    unit: Unit | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    max_error: float = 0.25,
) -> QuantUnit:
    """Asserts that a quantizer keeps its contract on ``unit`` with what ``layout`` demands, and returns what it made.

    Parts, dtypes and shapes are as planned, codes fit their bits and scales are what the layout may store, the same
    input gives the same bytes and stays as it is, code * step * scale is within ``max_error`` (relative, Frobenius) of
    the weights, a weight that is not finite is refused, and memory is what ``scratch_bytes`` says.
    """
    quantizer, layout, unit = bound(quantizer, config), bound(layout, config), read_only(unit or expert())
    spec = quantised_spec(quantizer, layout, unit.spec)
    check_plan_key(quantizer, unit.spec, lambda u: quantizer.plan(u, layout.demand(u)))
    made = quantised(quantizer, layout, unit, spec)
    again, peak = peak_of(lambda: quantizer.quantize(unit, spec))
    check_scratch(quantizer, peak, spec.nbytes, quantizer.scratch_bytes(unit.spec, spec))
    for part, got, same in zip(spec.parts, made.parts, again.parts, strict=True):
        label = f"{part.projection} {part.index}"
        for what in ("codes", "scales", "zeros"):
            assert np.array_equal(getattr(got, what), getattr(same, what)), f"{label}: a second call gives other {what}"
        weight = part.of(unit.tensors[part.role]).astype(np.float64)
        error = np.linalg.norm(dequantised(spec, got) - weight) / np.linalg.norm(weight)
        assert error <= max_error, f"{label}: relative error {error:.3f} is over {max_error}"
    _check_refusal(quantizer, unit, spec)
    return made


def quantised_spec(quantizer: Quantizer, layout: Layout, unit: UnitSpec) -> QuantSpec:
    """What a bound quantizer plans for a unit, once that is what the layout demands."""
    with kept():
        demand = expected(layout, layout.demand(unit), Demand, unit.name)
        spec = expected(quantizer, quantizer.plan(unit, demand), QuantSpec, unit.name)
    assert spec.unit == unit, f"{quantizer.name} plans for {spec.unit.name}, and was asked about {unit.name}"
    assert spec.parts == demand.parts, f"{quantizer.name} plans other parts than the layout {layout.name} demands"
    assert "/" in spec.method, f"the method {spec.method!r} has no version, as in name/1"
    return spec


def quantised(quantizer: Quantizer, layout: Layout, unit: Unit, spec: QuantSpec) -> QuantUnit:
    """What a quantizer makes of a unit, its values looked at even if its class is trusted."""
    with kept():
        return delivered_parts(quantizer, quantizer.quantize(unit, spec), spec, layout, trust=False)


def dequantised(spec: QuantSpec, part: QuantPart) -> np.ndarray:
    """The float64 weights [n, k] that a quantised part stands for."""
    columns = part.codes.shape[1]
    size = columns if spec.group_size is None else spec.group_size
    codes = part.codes.astype(np.float64)
    if part.zeros is not None:
        codes -= np.repeat(part.zeros.astype(np.float64), size, axis=1)[:, :columns]
    return codes * spec.step * np.repeat(part.scales.astype(np.float64), size, axis=1)[:, :columns]


def _check_refusal(quantizer: Quantizer, unit: Unit, spec: QuantSpec) -> None:
    role = spec.parts[-1].role
    for value in (np.nan, np.inf):
        broken = unit.tensors[role].copy()
        broken[-1, -1] = value
        try:
            quantizer.quantize(Unit(unit.spec, {**unit.tensors, role: broken}), spec)
        except CheckpointError:
            continue
        raise AssertionError(f"{quantizer.name} takes a weight with {value}: it is to raise CheckpointError")
