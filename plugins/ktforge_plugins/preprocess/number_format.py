"""What the preprocessors for number formats share: a weight in their format becomes BF16. Not a plugin itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import Preprocessor, Result, TensorSpec, Unit, UnitSpec, Unsupported
from ktforge.lazy import LazyTensors, Pending
from ktforge.quantization import quantization_config, without_quantization
from ktforge.tensors import BF16, DTYPES

#: Scales of activations: of no use once a weight is BF16.
ACTIVATION = frozenset(
    ["input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale", "qscale_act"]
)


#: The parameters that hold the numbers themselves, in any format.
CARRIERS = ("weight", "weight_packed", "qweight", "blocks")
PLAIN = frozenset([*(DTYPES[name] for name in ("F16", "F32", "F64")), BF16])


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight as a format stores it: the ``shape`` it will have, and the parameters that it is made of.

    ``fused_transposed``: the format's own readers keep fused experts as [E, in, out] and not [E, out, in].
    """

    shape: tuple[int, int]
    parameters: frozenset[str]
    fused_transposed: bool = False


class NumberFormat(Preprocessor):
    """Wherever a unit's weight is stored in this format, it becomes BF16; everything else passes through.

    Of fused experts, the format sees one at a time. ``quantization_config`` leaves config.json.
    """

    _quantization: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @abstractmethod
    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        """How this format stores the weight of a projection; None if these parameters are not of this format.

        Raises Unsupported if they are, but wrong.
        """

    @abstractmethod
    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        """The BF16 weight [out, in]. Raises CheckpointError for content that contradicts its headers."""

    def pending(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> Pending | None:
        """What :meth:`dequantize` would be made of, if a fused kernel may read that instead; None if none does."""
        return None

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._quantization = quantization_config(config)
        return bound

    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        return [plan_formats(unit, [self])]

    def apply(self, unit: Unit) -> Iterator[Unit]:
        yield apply_formats(unit, [self])

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        """Refuses weights in another format, which would stay behind with nothing in config.json to explain them."""
        for tensor in (t for result in results for t in _carried(result.unit)):
            if tensor.dtype not in PLAIN and len(tensor.shape) > 1:
                raise Unsupported(
                    f"{tensor} is of no format that {self.name} reads: add the preprocessor of its format"
                )
        return without_quantization(config)


def plan_formats(unit: UnitSpec, formats: Sequence[NumberFormat]) -> UnitSpec:
    """The unit with every weight that one of ``formats`` knows in BF16. Raises Unsupported with all that is wrong."""
    tensors: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for projection, parameters in unit.projections().items():
        prefix = f"{projection}." if projection else ""
        try:
            found = _find(unit, parameters, formats)
        except Unsupported as refusal:
            problems += refusal.problems
            continue
        if found is None:
            tensors |= {prefix + p: t for p, t in parameters.items()}
            continue
        _, stored = found
        tensors[prefix + "weight"] = _weight_spec(unit, parameters, stored)
        rest = parameters.keys() - stored.parameters - ACTIVATION
        tensors |= {prefix + p: t for p, t in parameters.items() if p in rest}
    if problems:
        raise Unsupported(*problems)
    return unit.with_tensors(tensors)


def apply_formats(unit: Unit, formats: Sequence[NumberFormat]) -> Unit:
    """The planned unit with its data."""
    planned = plan_formats(unit.spec, formats)
    made: dict[str, np.ndarray] = {}
    waiting: dict[str, Pending] = {}
    for projection, parameters in unit.spec.projections().items():
        prefix = f"{projection}." if projection else ""
        found = _find(unit.spec, parameters, formats)
        if found is not None:
            chosen, stored = found
            arrays = {p: unit.tensors[prefix + p] for p in stored.parameters}
            later = None if unit.spec.fused else chosen.pending(arrays, parameters)
            if later is not None:
                waiting[prefix + "weight"] = later
            else:
                made[prefix + "weight"] = _dequantised(chosen, stored, arrays, parameters, unit.spec)
    rest = {r: made[r] if r in made else unit.tensors[r] for r in planned.tensors if r not in waiting}
    return Unit(planned, LazyTensors(rest, waiting))


def _carried(unit: UnitSpec) -> Iterator[TensorSpec]:
    return (t for role, t in unit.tensors.items() if role.rpartition(".")[2] in CARRIERS)


def _find(
    unit: UnitSpec, parameters: Mapping[str, TensorSpec], formats: Sequence[NumberFormat]
) -> tuple[NumberFormat, Stored] | None:
    if unit.fused:
        parameters = _of_one(unit, parameters)
    for candidate in formats:
        stored = candidate.stored(parameters)
        if stored is not None:
            return candidate, stored
    return None


def _of_one(unit: UnitSpec, parameters: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Fused parameters as one expert sees them. One number for all experts stays one."""
    counts = (unit.experts,)
    return {p: replace(t, shape=t.shape[1:]) if t.shape[:1] == counts else t for p, t in parameters.items()}


def _weight_spec(unit: UnitSpec, parameters: Mapping[str, TensorSpec], stored: Stored) -> TensorSpec:
    """The BF16 tensor: ``x.weight_packed`` becomes ``x.weight``, ``gate_up_proj_blocks`` becomes ``gate_up_proj``."""
    carrier = next(p for p in CARRIERS if p in parameters)
    tensor = parameters[carrier]
    name = tensor.name
    if name.endswith("." + carrier):
        name = name.removesuffix(carrier) + "weight"
    elif name.endswith("_" + carrier):
        name = name.removesuffix("_" + carrier)
    shape: tuple[int, ...] = stored.shape
    if unit.fused:
        shape = (unit.experts, *(shape[::-1] if stored.fused_transposed else shape))
    return replace(tensor, name=name, dtype=BF16, shape=shape)


def _dequantised(
    chosen: NumberFormat,
    stored: Stored,
    arrays: Mapping[str, np.ndarray],
    parameters: Mapping[str, TensorSpec],
    unit: UnitSpec,
) -> np.ndarray:
    if not unit.fused:
        return chosen.dequantize(arrays, parameters)
    one = _of_one(unit, parameters)
    shape = stored.shape[::-1] if stored.fused_transposed else stored.shape
    out = np.empty((unit.experts, *shape), BF16)
    for e in range(unit.experts):
        mine = {p: a if a.shape == one[p].shape else a[e] for p, a in arrays.items()}
        weight = chosen.dequantize(mine, one)
        out[e] = weight.T if stored.fused_transposed else weight
    return out
