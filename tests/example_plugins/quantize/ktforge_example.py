"""The quantizer ``example``: 4-bit codes in groups, the largest weights clipped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from pydantic import Field

from ktforge import (
    CheckpointError,
    Demand,
    Part,
    Preset,
    Quantizer,
    QuantPart,
    QuantSpec,
    QuantUnit,
    Unit,
    UnitSpec,
    Unsupported,
    hookimpl,
)
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16

BITS, HIGHEST = 4, 7


class ExampleQuantizer(Quantizer):
    """Symmetric: scale = clip * largest / 7, as the layout stores it; code = weight / scale, rounded half to even."""

    name: ClassVar[str] = "example"
    group_size: int = Field(default=32, ge=1, description="Columns that share a scale.")
    clip: float = Field(default=0.95, gt=0, le=1, description="Where weights are cut off: a part of the largest one.")

    def plan_key(self) -> PlanKey:
        return alike  # the plan follows from roles, dtypes and shapes alone

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        for projection, parameters in unit.projections().items():
            if parameters.keys() != {"weight"} or parameters["weight"].dtype != BF16:
                found = ", ".join(map(str, parameters.values()))
                raise Unsupported(f"{projection} is {found}; {self.name} takes BF16 alone: put moe-to-bf16 before it")
        for part in demand.parts:
            if part.shape[1] % self.group_size:
                raise Unsupported(f"group_size {self.group_size} does not divide {part.shape[1]} columns")
        if demand.scale_bits is not None:
            raise Unsupported(f"{self.name} makes scales of 4-bit codes, and the layout asks for others")
        return QuantSpec(unit, demand.parts, BITS, f"{self.name}/1", self.group_size, scale_dtype=demand.scale_dtype)

    def quantize(self, unit: Unit, spec: QuantSpec) -> QuantUnit:
        return QuantUnit(spec, tuple(self._quantize(unit, spec, part) for part in spec.parts))

    def scratch_bytes(self, unit: UnitSpec, spec: QuantSpec) -> int:
        return max(3 * 4 * part.shape[0] * part.shape[1] for part in spec.parts)  # three float32 arrays of one part

    def _quantize(self, unit: Unit, spec: QuantSpec, part: Part) -> QuantPart:
        rows, columns = part.shape
        groups = part.of(unit.tensors[part.role]).astype(np.float32).reshape(rows, -1, self.group_size)
        largest = np.abs(groups).max(axis=2)
        if not np.isfinite(largest).all():
            raise CheckpointError(f"{unit.spec.tensors[part.role].name} is NaN or infinite somewhere: get a good copy")
        scales = (largest * np.float32(self.clip / HIGHEST)).astype(spec.scale_dtype)
        divisors = np.where(scales == 0, 1, scales).astype(np.float32)  # a group of zeros has the codes 0
        groups /= divisors[:, :, None]
        codes = np.rint(groups, out=groups).clip(-HIGHEST, HIGHEST, out=groups).astype(np.int8)
        return QuantPart(codes.reshape(rows, columns), scales)


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [ExampleQuantizer]


@hookimpl
def ktforge_presets() -> Iterable[Preset]:
    """`ktforge convert --quant-method example`."""
    return [Preset("example", {"use": "example"}, {"use": "compressed-tensors"}, "clipped INT4 for vLLM, SGLang")]
