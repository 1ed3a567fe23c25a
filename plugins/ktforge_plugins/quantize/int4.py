"""Quantizer ``int4``: 4-bit codes, one scale a row or a group of columns."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from ktforge import Demand, Part, Quantizer, QuantPart, QuantSpec, Unit, UnitSpec, Unsupported, hookimpl, native
from ktforge.calibration import Calibration, open_calibration
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16
from ktforge_plugins.quantize.integer import IntegerQuantizer, not_finite

#: Candidate scales, of the one at which the largest weight is the highest code. Sixteen lose .1 to .3 % of the error
#: against a search over all (docs/quality.md); where the inputs are known, large weights may matter less.
SEARCHED = np.linspace(0.4, 1.0, 16, dtype=np.float32)
CALIBRATED = np.linspace(0.25, 1.02, 64, dtype=np.float32)

Rule = Literal["absmax", "searched", "calibrated"]


class Int4(IntegerQuantizer):
    """Codes of 4 bits.

    ``scales``: ``absmax`` takes each from the largest weight, as KTransformers does; ``searched`` looks for the one
    with the smallest error weighted with the magnitudes; ``calibrated`` weights it with the mean squares of the
    inputs that ``calibration`` knows. ``auto`` is ``calibrated`` with a ``calibration`` and ``searched`` without.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    trusted: ClassVar[bool] = True
    scales: Literal["auto", "absmax", "searched", "calibrated"] = Field(
        default="absmax",
        description="What a scale is taken from: the largest weight, a search, or one that knows the inputs.",
    )
    calibration: Path | None = Field(
        default=None, description="What flows into the experts, by `ktforge calibrate`, or an imatrix of llama.cpp."
    )

    _opened: Calibration | None = PrivateAttr(default=None)
    _opening: Any = PrivateAttr(default_factory=threading.Lock)

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        if self.scales == "calibrated" and self.calibration is None:
            raise ValueError("scales: calibrated needs a calibration, which `ktforge calibrate` writes")
        if self.scales in ("absmax", "searched") and self.calibration is not None:
            raise ValueError(f"scales: {self.scales} looks at no calibration: leave it out, or set scales: calibrated")
        return self

    @property
    def rule(self) -> Rule:
        """What ``auto`` stands for."""
        if self.scales != "auto":
            return self.scales
        return "searched" if self.calibration is None else "calibrated"

    def input_files(self) -> Sequence[Path]:
        return () if self.calibration is None else (self.calibration,)

    def plan_key(self) -> PlanKey:
        return alike if self.rule != "calibrated" else self._what_is_unknown

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        spec = super().plan(unit, demand)
        if self.rule == "absmax":
            return spec
        if not self.symmetric:
            raise Unsupported(f"scales: {self.rule} is for symmetric codes: set symmetric: true, or scales: absmax")
        if self.rule == "calibrated":
            self._known().check(unit)
        return spec._replace(method=f"{self.rule}-{self.name}/1")

    def scratch_bytes(self, unit: UnitSpec, spec: QuantSpec) -> int:
        widest = max(part.shape[1] for part in spec.parts)
        return 0 if self.rule == "absmax" else 4 * 3 * widest + 64

    def _quantize_part(self, unit: Unit, spec: QuantSpec, part: Part) -> QuantPart:
        if self.rule == "absmax":
            return super()._quantize_part(unit, spec, part)
        codes, scales = np.empty(part.shape, np.int8), np.empty((part.shape[0], spec.groups(part)), np.float32)
        factors = SEARCHED if self.rule == "searched" else CALIBRATED
        try:
            native.search(
                part.of(unit.tensors[part.role]), spec.bits, spec.group_size or max(1, part.shape[1]), factors,
                self._weights(unit.spec, part), codes, scales, step=spec.step, bf16_scales=spec.scale_dtype == BF16,
            )  # fmt: skip
        except native.NotFinite as error:
            raise not_finite(unit.spec.tensors[part.role], part, error) from error
        return QuantPart(codes, scales.astype(spec.scale_dtype, copy=False))

    def _weights(self, unit: UnitSpec, part: Part) -> np.ndarray | None:
        """float32 [columns of the part], 1 at most: how much an error in each column counts."""
        if self.rule != "calibrated":
            return None
        squares = self._known().mean_squares(unit, part.projection)
        largest = squares.max()
        # Without any input that is not zero nothing is known, and each column counts alike.
        weights = squares / largest if largest > 0 else np.ones_like(squares)
        return np.ascontiguousarray(weights[part.cols[0] : part.cols[1]])

    def _known(self) -> Calibration:
        with self._opening:
            if self._opened is None:
                assert self.calibration is not None
                self._opened = open_calibration(self.calibration)
            return self._opened

    def _what_is_unknown(self, unit: UnitSpec) -> Hashable:
        try:
            self._known().check(unit)
        except Unsupported as refusal:
            return str(refusal)
        return None


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [Int4]
