"""What the absmax quantizers share: one scale a row from its largest weight. Not a plugin itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ktforge import (
    CheckpointError,
    Demand,
    Part,
    Quantizer,
    QuantPart,
    QuantSpec,
    QuantUnit,
    TensorSpec,
    Unit,
    UnitSpec,
    Unsupported,
    native,
)
from ktforge.tensors import BF16, dtype_name


class AbsmaxQuantizer(Quantizer):
    """Symmetric codes of ``bits`` bits with a float32 scale a row, by KTransformers' rule (docs/formats/kt-amx.md)."""

    bits: ClassVar[int]

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        for projection, parameters in unit.projections().items():
            weight = parameters.get("weight")
            if weight is None or weight.dtype != BF16:
                found = dtype_name(weight.dtype) if weight is not None else ", ".join(sorted(parameters))
                raise Unsupported(f"{projection} is {found}; {self.name} takes BF16: put moe-to-bf16 under preprocess")
            if len(parameters) > 1:
                others = ", ".join(sorted(parameters.keys() - {"weight"}))
                raise Unsupported(f"{projection} has {others} beside its weight, which {self.name} has no place for")
        if demand.scale_dtype != np.dtype(np.float32) or demand.scale_bits != 8:
            raise Unsupported(f"{self.name} makes float32 scales of 8-bit codes, and the layout asks for other ones")
        return QuantSpec(unit, demand.parts, self.bits, f"absmax-{self.name}/1", scale_bits=8)

    def quantize(self, unit: Unit, spec: QuantSpec) -> QuantUnit:
        done = []
        for part in spec.parts:
            role = f"{part.projection}.weight"
            codes = np.empty(part.shape, np.int8)
            scales = np.empty((part.shape[0], 1), np.float32)
            try:
                native.absmax(part.of(unit.tensors[role]), spec.bits, codes, scales.reshape(-1))
            except native.NotFinite as error:
                raise not_finite(unit.spec.tensors[role], part, error) from error
            done.append(QuantPart(codes, scales))
        return QuantUnit(spec, tuple(done))


def not_finite(tensor: TensorSpec, part: Part, error: native.NotFinite) -> CheckpointError:
    """The refusal of a weight that is NaN or infinite at a place in ``part``."""
    row, col = error.row + part.rows[0], error.col + part.cols[0]
    return CheckpointError(
        f"{tensor.file or 'the checkpoint'}: {tensor.name} is NaN or infinite at row {row}, column {col}: "
        "the checkpoint is damaged or was broken in training; get a good copy"
    )
