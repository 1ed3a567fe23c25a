"""Quantizer ``int4``: 4-bit codes, one scale a row or a group of columns."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ktforge import (
    Demand,
    Part,
    Quantizer,
    QuantPart,
    QuantSpec,
    Unit,
    UnitSpec,
    Unsupported,
    hookimpl,
    native,
)
from ktforge.calibration import Calibration, open_calibration
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16
from ktforge_plugins.quantize.feedback import Factor, check_inputs, codes_of, factors, scratch_bytes
from ktforge_plugins.quantize.integer import IntegerQuantizer, not_finite

#: Candidate scales, of the one at which the largest weight is the highest code. Sixteen lose .1 to .3 % of the error
#: against a search over all (docs/quality.md); where the inputs are known, large weights may matter less.
SEARCHED = np.linspace(0.4, 1.0, 16, dtype=np.float32)
CALIBRATED = np.linspace(0.25, 1.02, 64, dtype=np.float32)

Rule = Literal["absmax", "searched", "calibrated", "feedback"]


class Int4(IntegerQuantizer):
    """Codes of 4 bits.

    ``scales``: ``absmax`` takes each from the largest weight, as KTransformers does; ``searched`` looks for the one
    with the smallest error weighted with the magnitudes; ``calibrated`` weights it with the mean squares of the
    inputs that ``calibration`` knows; ``feedback`` also has each code make up for the errors of those before it (GPTQ),
    for which the calibration must have kept inputs. ``auto`` is ``feedback`` or ``calibrated`` with a ``calibration``;
    without, ``searched`` for a scale a row and ``absmax`` in groups.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    trusted: ClassVar[bool] = True
    scales: Literal["auto", "absmax", "searched", "calibrated", "feedback"] = Field(
        default="absmax",
        description="What a scale is taken from: the largest weight, a search, or one that knows the inputs.",
    )
    calibration: Path | None = Field(
        default=None, description="What flows into the experts, by `ktforge calibrate`, or an imatrix of llama.cpp."
    )

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        if self.scales in ("calibrated", "feedback") and self.calibration is None:
            raise ValueError(f"scales: {self.scales} needs a calibration, which `ktforge calibrate` writes")
        if self.scales in ("absmax", "searched") and self.calibration is not None:
            raise ValueError(f"scales: {self.scales} looks at no calibration: leave it out, or set scales: calibrated")
        return self

    @property
    def rule(self) -> Rule:
        """What ``auto`` stands for."""
        if self.scales != "auto":
            return self.scales
        if self.calibration is not None:
            return "calibrated"
        # In groups of 32 a search that knows nothing of the inputs was no better (docs/quality.md).
        return "searched" if self.group_size == "channel" and self.symmetric else "absmax"

    def input_files(self) -> Sequence[Path]:
        return () if self.calibration is None else (self.calibration,)

    def plan_key(self) -> PlanKey:
        return self._what_is_unknown if self.rule in ("calibrated", "feedback") else alike

    def plan(self, unit: UnitSpec, demand: Demand) -> QuantSpec:
        spec = super().plan(unit, demand)
        if self.rule == "absmax":
            return spec
        if not self.symmetric:
            raise Unsupported(f"scales: {self.rule} is for symmetric codes: set symmetric: true, or scales: absmax")
        if self.rule in ("calibrated", "feedback"):
            self._check(unit)
        return spec._replace(method=f"{self.rule}-{self.name}/1")

    def scratch_bytes(self, unit: UnitSpec, spec: QuantSpec) -> int:
        if self.rule == "absmax":
            return 0
        searching = 4 * 3 * max(part.shape[1] for part in spec.parts) + 64
        return searching + (scratch_bytes(unit, self._known()) if self.rule == "feedback" else 0)

    def _quantize_parts(self, unit: Unit, spec: QuantSpec) -> tuple[QuantPart, ...]:
        if self.rule != "feedback":
            return super()._quantize_parts(unit, spec)
        made: dict[Part, QuantPart] = {}
        for projection, known in factors(self._known(), unit).items():
            for rows in sorted({part.rows for part in spec.parts if part.projection == projection}):
                parts = [p for p in spec.parts if (p.projection, p.rows) == (projection, rows)]
                made |= self._with_feedback(unit, spec, parts, known)
        return tuple(made[part] for part in spec.parts)

    def _with_feedback(self, unit: Unit, spec: QuantSpec, parts: list[Part], known: Factor) -> dict[Part, QuantPart]:
        """``parts`` are what NUMA nodes get of the same rows: an error in one spreads into the others."""
        scales = [self._searched(unit, spec, part, CALIBRATED, weights_of(known.squares))[1] for part in parts]
        first, last = parts[0], parts[-1]
        weight = unit.tensors[first.role][first.rows[0] : first.rows[1]]
        if (first.cols[0], last.cols[1]) != (0, weight.shape[1]):
            raise ValueError(f"{first.projection} is not whole: feedback spreads errors over whole rows")
        group = spec.group_size or first.shape[1]
        codes = codes_of(weight, spec, group, known, np.ascontiguousarray(np.hstack(scales)))
        return {
            part: QuantPart(np.ascontiguousarray(codes[:, part.cols[0] : part.cols[1]]), found.astype(spec.scale_dtype))
            for part, found in zip(parts, scales, strict=True)
        }

    def _quantize_part(self, unit: Unit, spec: QuantSpec, part: Part) -> QuantPart:
        if self.rule == "absmax":
            return super()._quantize_part(unit, spec, part)
        weights = None
        if self.rule == "calibrated":
            weights = weights_of(self._known().mean_squares(unit.spec, part.projection))
        codes, scales = self._searched(unit, spec, part, CALIBRATED if self.calibration else SEARCHED, weights)
        return QuantPart(codes, scales.astype(spec.scale_dtype, copy=False))

    @staticmethod
    def _searched(
        unit: Unit, spec: QuantSpec, part: Part, factors: np.ndarray, weights: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """int8 codes [n, k] and float32 scales [n, groups] of a part; ``weights`` are for all columns of the weight."""
        codes, scales = np.empty(part.shape, np.int8), np.empty((part.shape[0], spec.groups(part)), np.float32)
        if weights is not None:
            weights = np.ascontiguousarray(weights[part.cols[0] : part.cols[1]])
        try:
            native.search(
                part.of(unit.tensors[part.role]), spec.bits, spec.group_size or max(1, part.shape[1]), factors, weights,
                codes, scales, step=spec.step, bf16_scales=spec.scale_dtype == BF16,
            )  # fmt: skip
        except native.NotFinite as error:
            raise not_finite(unit.spec.tensors[part.role], part, error) from error
        return codes, scales

    def _check(self, unit: UnitSpec) -> None:
        known = self._known()
        if self.rule == "feedback":
            check_inputs(known, unit)
        else:
            known.check(unit)

    def _known(self) -> Calibration:
        assert self.calibration is not None
        return _open(self.calibration, *_state(self.calibration))

    def _what_is_unknown(self, unit: UnitSpec) -> Hashable:
        try:
            self._check(unit)
        except Unsupported as refusal:
            return str(refusal)
        return None


def weights_of(squares: np.ndarray) -> np.ndarray:
    """float32 [columns], 1 at most: how much an error in each column counts."""
    largest = squares.max()
    # Without any input that is not zero nothing is known, and each column counts alike.
    return squares / largest if largest > 0 else np.ones_like(squares)


@lru_cache(maxsize=4)
def _open(path: Path, size: int, changed: int) -> Calibration:
    """A file is read once, by all quantizers that name it, as long as it stays the same."""
    return open_calibration(path)


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0  # opening it says why
    return found.st_size, found.st_mtime_ns


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [Int4]
