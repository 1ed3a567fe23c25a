"""Preprocessor ``moe-to-bf16``: experts of any precision become BF16, and so does whatever else is quantised."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import (
    CheckpointError,
    Preprocessor,
    Result,
    Stage,
    TensorSpec,
    Unit,
    UnitSpec,
    Unsupported,
    hookimpl,
    native,
)
from ktforge.contract.checks import blame
from ktforge.contract.pending import LazyTensors, pending
from ktforge.contract.stages import PlanKey, alike, own_plan_key
from ktforge.contract.tensors import BF16, CARRIERS, dtype_name
from ktforge.model.config import quantization_config, read_model_config
from ktforge.model.number_format import (
    ACTIVATION,
    NumberFormat,
    apply_formats,
    plain_config,
    plan_formats,
    scratch_of_formats,
    unmade_roles,
)
from ktforge_plugins.preprocess.awq import Awq
from ktforge_plugins.preprocess.compressed_tensors import CompressedTensorsFormat
from ktforge_plugins.preprocess.fp4 import Fp4
from ktforge_plugins.preprocess.fp8 import Fp8
from ktforge_plugins.preprocess.gptq import Gptq

#: The formats that are asked first, in this order; each is a preprocessor of its own, too.
FORMATS: tuple[type[NumberFormat], ...] = (Fp8, Fp4, CompressedTensorsFormat, Gptq, Awq)
#: What an expert's projection may have beside its weight; a bias passes through.
KNOWN = {"weight", "bias"} | ACTIVATION
_FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8"}


class MoeToBf16(Preprocessor):
    """Experts, fused or not, in FP32, FP16 or any installed number format become BF16.

    Other weights in one of the formats become BF16 too, since ``quantization_config`` leaves config.json with the
    experts; other tensors stay as they are. In a dense model, on the way to a layout, every matrix becomes BF16.
    ``input_type`` is a promise about the experts that is checked.
    """

    name: ClassVar[str] = "moe-to-bf16"
    rowwise: ClassVar[bool] = True
    experts_only: ClassVar[bool] = True
    input_type: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"

    _formats: tuple[NumberFormat, ...] = PrivateAttr(default_factory=lambda: tuple(f() for f in FORMATS))
    _dense: bool = PrivateAttr(default=False)

    #: What config.json calls the checkpoint's format, to be said of one that is not read.
    _said: str = PrivateAttr(default="")

    def equip(self, classes: Sequence[type[Stage]]) -> Self:
        """Formats of other plugins are asked behind ktforge's own; one with options that must be given is not."""
        equipped = self.model_copy()
        more = [c for c in classes if issubclass(c, NumberFormat) and c not in FORMATS]
        with_defaults = [c for c in more if not any(f.is_required() for f in c.model_fields.values())]
        equipped._formats = tuple(map(_made, (*FORMATS, *with_defaults)))
        return equipped

    def delegates(self) -> Sequence[Stage]:
        return self._formats

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._formats = tuple(f.bind(config) for f in self._formats)
        method = quantization_config(config).get("quant_method")
        bound._said = f" (quant_method {method} by config.json)" if isinstance(method, str) else ""
        with suppress(CheckpointError):  # a config.json without sizes, about which the plan has its own words
            bound._dense = read_model_config(config).experts == 0
        return bound

    def plan_key(self) -> PlanKey | None:
        """None if a format wants to see every unit."""
        answers = [own_plan_key(f) for f in self._formats]
        keys = [key for key in answers if key is not None and key is not alike]
        if None in answers:
            return None
        return (lambda unit: tuple(key(unit) for key in keys)) if keys else alike

    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        if not unit.is_expert and not unit.fused:
            other = self._checked_other(plan_formats(unit, self._formats))
            return [self._dense_in_bf16(other) if self._dense else other]
        problems = self._contradictions(unit)
        try:
            planned = plan_formats(unit, self._formats)
        except Unsupported as refusal:
            raise Unsupported(*problems, *refusal.problems) from None
        unread: dict[str, list[str]] = {}
        for projection, parameters in planned.projections().items():
            if stored := _unread(parameters):
                unread.setdefault(stored, []).append(projection)
        for stored, projections in unread.items():
            verb = "are" if projections[1:] else "is"
            problems.append(
                f"{', '.join(projections)} {verb} stored as {stored}{self._said}, which {self.name} does not read; "
                f"it knows {self._known()}: get a copy in one of them"
            )
        if problems:
            raise Unsupported(*problems)
        tensors = {
            role: t._replace(dtype=BF16) if role.endswith(".weight") else t for role, t in planned.tensors.items()
        }
        return [unit.with_tensors(tensors)]

    def apply(self, unit: Unit) -> Iterator[Unit]:
        (planned,) = self.plan(unit.spec)
        made = apply_formats(unit, self._formats).tensors
        waiting = {role: tensor for role in planned.tensors if (tensor := pending(made, role)) is not None}
        rest = {role: _in(made[role], spec) for role, spec in planned.tensors.items() if role not in waiting}
        yield Unit(planned, LazyTensors(rest, waiting))

    def scratch_bytes(self, unit: UnitSpec) -> int:
        return scratch_of_formats(unit, self._formats)

    def unmade(self, unit: UnitSpec) -> Collection[str]:
        return unmade_roles(unit, self._formats)

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        return plain_config(
            config, results, f"get a copy that is whole, in one that {self.name} knows: {self._known()}"
        )

    def _known(self) -> str:
        return "BF16, FP16, FP32, " + ", ".join(f.name for f in self._formats)

    def _contradictions(self, unit: UnitSpec) -> list[str]:
        """A sentence for each way in which projections are stored that is not the ``input_type``."""
        if self.input_type == "auto":
            return []
        found: dict[tuple[str, str], list[str]] = {}
        for projection, parameters in unit.projections().items():
            weight = parameters.get("weight")
            word = _FLOATS.get(dtype_name(weight.dtype)) if weight is not None else None
            if word != self.input_type:
                stored = dtype_name(weight.dtype) if weight is not None else ", ".join(sorted(parameters))
                found.setdefault((stored, f"{word} or auto" if word else "auto"), []).append(projection)
        return [
            f"the input type was given as {self.input_type}, but {', '.join(projections)} "
            f"{'are' if projections[1:] else 'is'} {stored}: say {mend}"
            for (stored, mend), projections in found.items()
        ]

    def _dense_in_bf16(self, unit: UnitSpec) -> UnitSpec:
        if self.input_type != "auto":
            raise Unsupported(
                f"the input type was given as {self.input_type}, for experts, and there are none: say auto"
            )
        weight = unit.tensors.get("weight")
        if weight is None or len(weight.shape) != 2 or dtype_name(weight.dtype) not in ("F16", "F32"):
            return unit
        return unit.with_tensors({**unit.tensors, "weight": weight._replace(dtype=BF16)})

    def _checked_other(self, unit: UnitSpec) -> UnitSpec:
        """Refuses a quantised weight that would stay behind with nothing in config.json to explain it."""
        for role in CARRIERS:
            tensor = unit.tensors.get(role)
            if tensor is not None and len(tensor.shape) > 1 and tensor.dtype.kind in "iu":
                stored = ", ".join(unit.tensors)
                raise Unsupported(
                    f"{dtype_name(tensor.dtype)} weights ({stored}){self._said} are not read; {self._known()} are: "
                    "get a copy in one of them"
                )
        return unit


def _made(number_format: type[NumberFormat]) -> NumberFormat:
    with blame(number_format, "its defaults"):
        return number_format()


def _unread(parameters: Mapping[str, TensorSpec]) -> str | None:
    """What no format turned into a weight, in words; None if there is a weight that this preprocessor reads."""
    weight = parameters.get("weight")
    if weight is not None and dtype_name(weight.dtype) not in ("BF16", "F16", "F32"):
        return dtype_name(weight.dtype)
    return ", ".join(sorted(parameters)) if weight is None or parameters.keys() - KNOWN else None


def _in(array: np.ndarray, planned: TensorSpec) -> np.ndarray:
    return array if array.dtype == planned.dtype else native.to_bf16(array)


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [MoeToBf16]
