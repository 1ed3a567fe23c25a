"""The quantizer and the layout ``example``: a scale for each run of columns, and codes and scales as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import ml_dtypes
import numpy as np
from pydantic import Field

from ktforge import (
    CheckpointError,
    Demand,
    Layout,
    PackedSpec,
    PackedUnit,
    Part,
    Quantizer,
    QuantPart,
    QuantSpec,
    QuantUnit,
    TensorSpec,
    Unit,
    UnitSpec,
    Unsupported,
    hookimpl,
)

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]


class ExampleQuantizer(Quantizer):
    """Symmetric: scale = largest / (2^(bits - 1) - 1), code = weight / scale, rounded half to even."""

    name: ClassVar[str] = "example"
    bits: int = Field(default=4, ge=2, le=8, description="Bits of a code.")
    group_size: int = Field(default=32, ge=1, description="Columns that share a scale.")

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        for projection, parameters in unit.projections().items():
            if parameters.keys() != {"weight"} or parameters["weight"].dtype not in FLOATS:
                found = ", ".join(map(str, parameters.values()))
                raise Unsupported(f"{projection} is {found}; {self.name} takes a float weight and nothing beside it")
        for part in demand.parts:
            if part.shape[1] % self.group_size:
                raise Unsupported(f"group_size {self.group_size} does not divide {part.shape[1]} columns")
        if demand.scale_dtype != np.float32 or demand.scale_bits is not None:
            raise Unsupported(f"{self.name} makes float32 scales of its own codes, and the layout asks for other ones")
        return QuantSpec(unit, demand.parts, self.bits, f"{self.name}/1", group_size=self.group_size)

    def quantize(self, unit: Unit, spec: QuantSpec) -> QuantUnit:
        return QuantUnit(spec, tuple(self._quantize(unit, part) for part in spec.parts))

    def scratch_bytes(self, unit: UnitSpec, spec: QuantSpec) -> int:
        return max(4 * 4 * part.shape[0] * part.shape[1] for part in spec.parts)  # four float32 arrays of one part

    def _quantize(self, unit: Unit, part: Part) -> QuantPart:
        rows, columns = part.shape
        groups = part.of(unit.tensors[part.role]).astype(np.float32).reshape(rows, -1, self.group_size)
        if not np.isfinite(groups).all():
            raise CheckpointError(f"{unit.spec.tensors[part.role].name} is NaN or infinite somewhere: get a good copy")
        highest = 2 ** (self.bits - 1) - 1
        scales = np.abs(groups).max(axis=2) / np.float32(highest)
        divisors = np.where(scales == 0, np.float32(1), scales)  # a group of zeros has the codes 0
        codes = np.rint(groups / divisors[:, :, None]).clip(-highest, highest).astype(np.int8)
        return QuantPart(codes.reshape(rows, columns), scales)


class ExampleLayout(Layout):
    """For each weight one I8 tensor of codes [n, k] and one F32 tensor of scales [n, groups]."""

    name: ClassVar[str] = "example"

    def plan(self, spec: QuantSpec) -> PackedSpec:
        if not spec.symmetric:
            raise Unsupported(f"{self.name} has no place for zero points")
        tensors = []
        for part in spec.parts:
            codes, scales = self._names(spec.unit, part)
            tensors.append(TensorSpec(codes, np.dtype(np.int8), part.shape))
            tensors.append(TensorSpec(scales, spec.scale_dtype, (part.shape[0], spec.groups(part))))
        return PackedSpec(tuple(tensors), f"{self.name}/1")

    def pack(self, unit: QuantUnit, out: PackedUnit) -> None:
        for part, quantised in zip(unit.spec.parts, unit.parts, strict=True):
            codes, scales = self._names(unit.spec.unit, part)
            out[codes][:] = quantised.codes
            out[scales][:] = quantised.scales

    @staticmethod
    def _names(unit: UnitSpec, part: Part) -> tuple[str, str]:
        source = unit.tensors[part.role].name
        return f"{source}_codes", f"{source}_scales"


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [ExampleQuantizer]


@hookimpl
def ktforge_layouts() -> Iterable[type[Layout]]:
    return [ExampleLayout]
