"""Number formats: what the preprocessors have in common that turn a weight in their format into BF16."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge.contract.checks import blame, expected
from ktforge.contract.pending import LazyTensors, Pending
from ktforge.contract.plan import ModelConfig
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader, PlanKey, Preprocessor, Result
from ktforge.contract.tensors import BF16, CARRIERS, DTYPES, TensorSpec, Unit, UnitSpec
from ktforge.errors import ConfigError, Unsupported
from ktforge.model.config import quantization_config, without_quantization

#: Scales of activations: of no use once a weight is BF16.
ACTIVATION = frozenset(
    ["input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "activation_scale", "qscale_act"]
)

#: Characters of a remark that are shown.
REMARK_LIMIT = 1000
#: What to do about a tensor that is not there.
DOWNLOAD = "download it again"
#: dtypes of quantised weights.
PACKED = frozenset(DTYPES[d] for d in ("I8", "U8", "I16", "U16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0"))


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

    Of fused experts, the format sees one at a time. ``quantization_config`` leaves config.json. The preprocessor
    ``moe-to-bf16`` knows every installed subclass that has no options it must be given.
    """

    _quantization: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @abstractmethod
    def plan_key(self) -> PlanKey:
        """See :meth:`ktforge.Preprocessor.plan_key`; here for :meth:`stored` alone."""

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

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        """Bytes that :meth:`dequantize` needs at once, beside what it is given and the weight that it makes."""
        return 0

    def is_pending(self, parameters: Mapping[str, TensorSpec]) -> bool:
        """Whether :meth:`pending` gives something for a weight in this format."""
        return False

    def remarks(self, loader: Loader, model: ModelConfig, experts: Sequence[UnitSpec]) -> Iterable[str]:
        """What ``ktforge inspect`` shall say of weights in this format, a sentence each, after a bounded look at data.

        ``experts`` are all that ``loader`` has. Raises CheckpointError for a part of a file that cannot be read.
        """
        return ()

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._quantization = quantization_config(config)
        return bound

    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        return [plan_formats(unit, [self])]

    def apply(self, unit: Unit) -> Iterator[Unit]:
        yield apply_formats(unit, [self])

    def scratch_bytes(self, unit: UnitSpec) -> int:
        return scratch_of_formats(unit, [self])

    def unmade(self, unit: UnitSpec) -> Collection[str]:
        return unmade_roles(unit, [self])

    def edit_config(self, config: Mapping[str, Any], results: Sequence[Result]) -> Mapping[str, Any]:
        return plain_config(config, results, "add the preprocessor of its format, or moe-to-bf16 for a MoE model")


def plan_formats(unit: UnitSpec, formats: Sequence[NumberFormat]) -> UnitSpec:
    """The unit with every weight that one of ``formats`` knows in BF16. Raises Unsupported with all that is wrong."""
    tensors: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for projection, parameters in unit.projections().items():
        prefix = f"{projection}." if projection else ""
        try:
            found = _find(unit, parameters, formats)
        except Unsupported as refusal:
            problems += [p for p in refusal.problems if p not in problems]  # what goes for all is said once
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


def unmade_roles(unit: UnitSpec, formats: Sequence[NumberFormat]) -> Collection[str]:
    """The roles that :func:`apply_formats` leaves pending."""
    roles = []
    for projection, parameters in unit.projections().items():
        found = None if unit.fused else _find(unit, parameters, formats)
        if found is not None and found[0].is_pending(parameters):
            roles.append(f"{projection}.weight" if projection else "weight")
    return roles


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


def scratch_of_formats(unit: UnitSpec, formats: Sequence[NumberFormat]) -> int:
    """:meth:`Preprocessor.scratch_bytes` of :func:`apply_formats`: projections are made one after the other, and fused
    experts too, each of them before it is put in its place."""
    most = 0
    for parameters in unit.projections().values():
        found = _find(unit, parameters, formats)
        if found is not None:
            chosen, stored = found
            one = _of_one(unit, parameters) if unit.fused else parameters
            whole = math.prod(stored.shape) * BF16.itemsize if unit.fused else 0
            most = max(most, whole + chosen.scratch(one))
    return most


def plain_config(config: Mapping[str, Any], results: Sequence[Result], mend: str) -> Mapping[str, Any]:
    """config.json for a checkpoint whose weights are all plain.

    Raises Unsupported, with what to do, if ``results`` still hold weights that only the old one explains.
    """
    edited = without_quantization(config)
    left = [
        (tensor, sorted(t.name for t in result.unit.tensors.values() if t.name != tensor.name))
        for result in results if result.packed is None for tensor in result.outputs if _is_packed(tensor)
    ]  # fmt: skip
    if left and edited != config:
        (tensor, others), more = left[0], f" and {len(left) - 1:,} more" if left[1:] else ""
        beside = f"with {' and '.join(others[:3])} beside it" if others else "with no scale beside it"
        raise Unsupported(
            f"{tensor}{more} would stay quantised, without the quantization_config of config.json that says how: "
            f"{beside}, it is in no form that is read here; {mend}"
        )
    return edited


def _is_packed(tensor: TensorSpec) -> bool:
    """By its dtype. Integers that belong to a model itself, such as token tables, have 64 bits."""
    return len(tensor.shape) > 1 and tensor.dtype in PACKED


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
    return {p: t._replace(shape=t.shape[1:]) if t.shape[:1] == counts else t for p, t in parameters.items()}


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
    return tensor._replace(name=name, dtype=BF16, shape=shape)


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
    place = out.swapaxes(1, 2) if stored.fused_transposed else out
    for e in range(unit.experts):
        mine = {p: a if a.shape == one[p].shape else a[e] for p, a in arrays.items()}
        place[e] = chosen.dequantize(mine, one)
    return out


def remarks_of(registry: Registry, loader: Loader, model: ModelConfig, experts: Sequence[UnitSpec]) -> Iterator[str]:
    """What the installed number formats say of the data of ``experts``, which are all that ``loader`` has."""
    for entry in registry.entries():
        if issubclass(entry.cls, NumberFormat):
            try:
                stage = registry.build("preprocess", entry.cls.name, {})
            except ConfigError:  # it needs options
                continue
            with blame(stage, str(loader.folder())):
                remarks = stage.remarks(loader, model, experts)
                remarks = [remarks] if isinstance(remarks, str) else list(remarks)
            for remark in remarks:
                yield expected(stage, remark, str, "a remark")[:REMARK_LIMIT]
