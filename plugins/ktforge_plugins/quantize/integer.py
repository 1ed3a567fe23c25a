"""What the integer quantizers share. Not a plugin itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt

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
from ktforge.contract import finite
from ktforge.contract.presets import Option
from ktforge.contract.tensors import BF16, F32, dtype_name

#: The scale of an 8-bit code: what KTransformers' packed formats store, whatever their bits.
KT_SCALE_BITS = 8


#: What presets of INT4 take of the command line.
SCALES: Mapping[Option, str] = {"scales": "quantize.scales", "calibration": "quantize.calibration"}


def kt_method(bits: int) -> str:
    """The method of KTransformers' rule, which kt-amx reads back and does in one pass."""
    return f"absmax-int{bits}/2"


class IntegerQuantizer(Quantizer):
    """Codes of ``bits`` bits and a scale per group of columns, from the group's extremes.

    The layout decides the rule: KTransformers' where it stores scales of 8-bit codes (docs/formats/kt-amx.md), with one
    scale a row; otherwise that of docs/formats/compressed-tensors.md.
    """

    bits: ClassVar[int]
    group_size: Literal["channel"] | PositiveInt = Field(
        default="channel", description="Columns that share a scale, such as 32 or 128; `channel` is a whole row."
    )
    symmetric: bool = Field(default=True, description="Codes without a zero point.")
    narrow_range: bool = Field(
        default=False,
        description="Symmetric codes without the lowest, -8 of 4 bits, which KTransformers' RAWINT4 up to 0.7.0 "
        "computes wrongly on AVX-512.",
    )

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        for projection, parameters in unit.projections().items():
            self._check_weight(projection or unit.name, parameters)
        if demand.scale_dtype not in (F32, BF16):
            raise Unsupported(f"{self.name} makes F32 or BF16 scales; the layout asks for {demand.scale_dtype}")
        if demand.scale_bits is not None:
            return self._plan_kt(unit, demand)
        if self.narrow_range and not self.symmetric:
            raise Unsupported("narrow_range is for symmetric codes: set symmetric: true, or leave it out")
        size = None if self.group_size == "channel" else self.group_size
        for part in demand.parts:
            if size is not None and part.shape[1] % size:
                label = part.projection or "the weight"
                raise Unsupported(f"group_size {size} does not divide the {part.shape[1]} columns of {label}")
        method = f"minmax-{'narrow-' * self.narrow_range}{self.name}/1"
        return QuantSpec(unit, demand.parts, self.bits, method, size, self.symmetric, demand.scale_dtype)

    def quantize(self, unit: Unit, spec: QuantSpec) -> QuantUnit:
        return QuantUnit(spec, self._quantize_parts(unit, spec))

    def _quantize_parts(self, unit: Unit, spec: QuantSpec) -> tuple[QuantPart, ...]:
        return tuple(self._quantize_part(unit, spec, part) for part in spec.parts)

    def _plan_kt(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        if demand.scale_bits != KT_SCALE_BITS or demand.scale_dtype != np.float32:
            raise Unsupported(f"{self.name} makes F32 scales of {KT_SCALE_BITS}-bit codes, the layout asks for others")
        if self.group_size != "channel" or not self.symmetric:
            raise Unsupported(
                "the layout has room for one scale a row and no zero point (as KTransformers' packed experts are): "
                "set group_size: channel and symmetric: true"
            )
        return QuantSpec(unit, demand.parts, self.bits, kt_method(self.bits), scale_bits=KT_SCALE_BITS)

    def _quantize_part(self, unit: Unit, spec: QuantSpec, part: Part) -> QuantPart:
        weight = part.of(unit.tensors[part.role])
        shape = (part.shape[0], spec.groups(part))
        codes, scales = np.empty(part.shape, np.int8), np.empty(shape, np.float32)
        zeros = None if spec.symmetric else np.empty(shape, np.int8)
        try:
            if spec.scale_bits is not None:
                native.absmax(weight, spec.bits, codes, scales.reshape(-1))
            else:
                size = spec.group_size or max(1, part.shape[1])
                bf16_scales = spec.scale_dtype == BF16
                native.group(weight, spec.bits, size, bf16_scales, codes, scales, zeros, narrow=self.narrow_range)
        except native.NotFinite as error:
            raise not_finite(unit.spec.tensors[part.role], part, error) from error
        return QuantPart(codes, scales.astype(spec.scale_dtype, copy=False), zeros)

    def _check_weight(self, label: str, parameters: dict) -> None:
        weight = parameters.get("weight")
        if weight is None or weight.dtype != BF16:
            found = dtype_name(weight.dtype) if weight is not None else ", ".join(sorted(parameters))
            raise Unsupported(f"{label} is {found}; {self.name} takes BF16: put moe-to-bf16 under preprocess")
        if len(parameters) > 1:
            others = ", ".join(sorted(parameters.keys() - {"weight"}))
            raise Unsupported(f"{label} has {others} beside its weight, which {self.name} has no place for")


def not_finite(tensor: TensorSpec, part: Part, error: native.NotFinite) -> CheckpointError:
    """The refusal of a weight that is NaN or infinite at a place in ``part``."""
    return finite.not_finite(tensor, (error.row + part.rows[0], error.col + part.cols[0]))
