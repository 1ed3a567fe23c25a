"""Preprocessor ``compressed-tensors``: integer weights as that library stores them become BF16.

Its float forms need no code here: float-quantized weights are ``fp8``'s, those of 4 bits ``fp4``'s.
Source of the formats: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import CheckpointError, Loader, ModelConfig, Preprocessor, TensorSpec, UnitSpec, Unsupported, hookimpl
from ktforge.contract.rules import CHOICES_LIMIT, may_take_forever
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES, dtype_name
from ktforge.model.names import canonical
from ktforge.model.number_format import DOWNLOAD, NumberFormat, Stored
from ktforge_plugins.preprocess import integers, scales
from ktforge_plugins.preprocess.lowest_codes import lowest_codes

I8, I32 = DTYPES["I8"], DTYPES["I32"]
#: What to do about tensors that config.json does not fit.
CONFIG = "get the config.json that belongs to it"
ZERO, GROUPS, SHAPE = "weight_zero_point", "weight_g_idx", "weight_shape"


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a config group says about weights. ``group_size`` None: one scale a row, or one for all."""

    bits: int
    symmetric: bool
    group_size: int | None


@dataclass(frozen=True, slots=True)
class Targets:
    """A list of targets, taken apart once, since 70,000 names may be asked about.

    Which class a module has, its name does not say; those that are quantised are linear layers, whatever a model calls
    them, so ``classes`` says whether any class is named.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    classes: bool = False

    @classmethod
    def of(cls, targets: Any) -> Targets:
        """Raises Unsupported for a pattern that is none, or one that may take forever to match."""
        words = [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else []
        for word in words:
            if word.startswith("re:") and may_take_forever(word[3:]):
                raise Unsupported(
                    f"config.json: quantization_config has a pattern that may take forever to match, {word[:80]!r}: "
                    f"write it without repeated groups, with {CHOICES_LIMIT} repetitions and groups at most"
                )
        try:
            patterns = tuple(re.compile(w[3:]) for w in words if w.startswith("re:"))
        except re.error as error:
            raise Unsupported(
                f"config.json: quantization_config has a pattern that is none: {error.pattern!r}"
            ) from None
        classes = any(re.fullmatch(r"[A-Z]\w*", w) for w in words)
        return cls(frozenset(words), patterns, classes)

    def name(self, module: str) -> bool:
        """Whether ``module`` is named, in full or by a pattern, with or without a wrapper's ``language_model.``."""
        return any(n in self.names or any(p.match(n) for p in self.patterns) for n in {module, canonical(module)})


class CompressedTensorsFormat(NumberFormat):
    """pack-quantized (int32 words, 2, 4 or 8 bits, low bits first) and int-quantized (int8) weights become BF16.

    value = (code - zero point) * scale in float32, rounded once. The library itself computes in the dtype of the
    scale; that is the same for BF16 scales, and one rounding more for others.
    ``config_groups`` with their ``targets`` and ``ignore`` say which scheme a weight has; its tensors must agree.
    """

    name: ClassVar[str] = "compressed-tensors"
    rowwise: ClassVar[bool] = True

    _ignored: Targets = PrivateAttr(default_factory=Targets)
    _groups: list[tuple[Targets, Any]] = PrivateAttr(default_factory=list)

    def plan_key(self) -> PlanKey:
        return self._schemes if self._groups else alike

    def _schemes(self, unit: UnitSpec) -> Hashable:
        """config.json gives them by name."""
        codes = (t for t in unit.tensors.values() if t.dtype in (I8, I32, scales.U8))
        return tuple(self._scheme(t.name) for t in codes if t.name.endswith((".weight", ".weight_packed")))

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        packed, plain, scale = (parameters.get(p) for p in ("weight_packed", "weight", "weight_scale"))
        codes = packed or plain
        if codes is None or codes.dtype not in ((I32, scales.U8) if packed else (I8,)):
            return None
        if scale is not None and scale.dtype not in scales.FLOATS:
            return None  # 4-bit floats
        if scale is None:
            if packed is None:
                return None
            raise Unsupported(
                f"{codes.name} is packed, but its weight_scale is missing from the checkpoint: {DOWNLOAD}"
            )
        if len(codes.shape) != 2:
            raise Unsupported(f"{codes} is packed but no matrix")
        scheme = self._scheme(codes.name)
        shape = (codes.shape[0], _columns(codes, scale, scheme))
        _check(parameters, codes, scale, shape, scheme)
        names = {"weight_packed" if packed else "weight", "weight_scale", ZERO, GROUPS, SHAPE}
        return Stored(shape, frozenset(names & parameters.keys()))

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        stored = self.stored(parameters)
        assert stored is not None
        rows, columns = stored.shape
        spec = parameters["weight_packed" if "weight_packed" in arrays else "weight"]
        scheme = self._scheme(spec.name)
        if SHAPE in arrays and tuple(arrays[SHAPE].tolist()) != stored.shape:
            raise CheckpointError(
                f"{spec.file or 'the checkpoint'}: {parameters[SHAPE].name} is {arrays[SHAPE].tolist()}, but {spec} "
                f"holds {list(stored.shape)} in {scheme.bits} bits"
            )
        block = scales.block_of(spec, stored.shape, parameters["weight_scale"])
        scale = scales.values_of(arrays["weight_scale"], stored.shape, block)
        # One number for all rows serves each of them.
        scale = np.ascontiguousarray(np.broadcast_to(scale, (rows, scale.shape[1])))
        words = arrays.get("weight_packed")
        if words is not None and not {ZERO, GROUPS} & arrays.keys():
            return integers.symmetric(words, scheme.bits, columns, scale, block[1])
        zeros = arrays.get(ZERO)
        if zeros is not None and zeros.dtype == I32:  # packed along the rows
            zeros = integers.signed(zeros.T, scheme.bits)[:, :rows].T
        if zeros is not None:
            zeros = np.broadcast_to(zeros.reshape(-1, scale.shape[1]), scale.shape)

        def codes(some: slice) -> np.ndarray:
            return arrays["weight"][some] if words is None else integers.signed(words[some], scheme.bits)[:, :columns]

        order = arrays.get(GROUPS)
        if order is None or (order < 0).all():  # -1 where no order was ever chosen
            return integers.affine(codes, stored.shape, zeros, scale)
        if order.min() < 0 or order.max() >= scale.shape[1]:
            tensor = parameters[GROUPS]
            raise CheckpointError(
                f"{tensor.file or 'the checkpoint'}: {tensor.name} points to a group outside the {scale.shape[1]}"
            )
        return integers.affine(codes, stored.shape, zeros, scale, order)

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        stored = self.stored(parameters)
        assert stored is not None
        rows, columns = stored.shape
        scale = math.prod(parameters["weight_scale"].shape)
        # Scales as float32 once as stored and once for each row, zero points a byte each.
        return integers.scratch(rows, columns) + 10 * max(scale, rows)

    def remarks(self, loader: Loader, model: ModelConfig, experts: Sequence[UnitSpec]) -> Iterable[str]:
        found = lowest_codes(loader, model, experts)
        return () if found is None else (str(found),)

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = super().bind(config)
        bound._ignored = Targets.of(bound._quantization.get("ignore"))
        bound._groups = []
        groups = bound._quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if isinstance(group, Mapping):
                bound._groups.append((Targets.of(group.get("targets")), group.get("weights")))
        return bound

    def _scheme(self, tensor: str) -> Scheme:
        """The scheme of the config group that ``tensor`` belongs to. Raises Unsupported if there is none."""
        module = tensor.rpartition(".")[0]
        if self._ignored.name(module):
            raise Unsupported(f"{tensor} is quantised, but config.json lists {module} under ignore: {CONFIG}")
        by_name = (weights for targets, weights in self._groups if targets.name(module))
        by_class = (weights for targets, weights in self._groups if targets.classes)
        for weights in (*by_name, *by_class):
            return _scheme_of(weights, tensor)
        raise Unsupported(
            f"{tensor} is quantised, but no quantization_config.config_groups of config.json is for it: {CONFIG}"
        )


def _scheme_of(weights: Any, tensor: str) -> Scheme:
    if not isinstance(weights, Mapping):
        raise Unsupported(f"{tensor}: its group in quantization_config says nothing about weights")
    bits, numbers, group = (weights.get(k) for k in ("num_bits", "type", "group_size"))
    if numbers != "int" or bits not in (2, 4, 8):
        raise Unsupported(
            f"{tensor}: config.json says {numbers} of {bits} bits; integers of 2, 4 or 8 bits are read: "
            "get a copy in one"
        )
    grouped = weights.get("strategy") == "group" or (weights.get("strategy") is None and group)
    if grouped and not (type(group) is int and group > 0):
        raise Unsupported(f"{tensor}: config.json says groups of {group!r} columns")
    return Scheme(bits, weights.get("symmetric") is not False, group if grouped else None)


def _columns(codes: TensorSpec, scale: TensorSpec, scheme: Scheme) -> int:
    """Columns of the weight: those of whole groups, else all that the words have room for."""
    if codes.dtype == I8:
        return codes.shape[1]
    if scheme.group_size and len(scale.shape) == 2:
        return scale.shape[1] * scheme.group_size
    return codes.shape[1] * codes.dtype.itemsize * 8 // scheme.bits


def _check(
    parameters: Mapping[str, TensorSpec], codes: TensorSpec, scale: TensorSpec, shape: tuple[int, int], scheme: Scheme
) -> None:
    problems = list(_problems(parameters, codes, scale, shape, scheme))
    if problems:
        raise Unsupported(*problems)


def _problems(
    parameters: Mapping[str, TensorSpec], codes: TensorSpec, scale: TensorSpec, shape: tuple[int, int], scheme: Scheme
) -> Iterator[str]:
    rows, columns = shape
    groups = columns // scheme.group_size if scheme.group_size else 1
    fitting = [(rows, groups)] if groups > 1 else [(rows, 1), (rows,), (1,), (), (1, 1)]
    what = f"groups of {scheme.group_size}" if scheme.group_size else "one scale a row or one for all"
    if codes.dtype != I8 and codes.shape[1] != -(-columns * scheme.bits // (8 * codes.dtype.itemsize)):
        yield f"{codes} does not hold the {columns} columns of {scale} in {scheme.bits} bits and {what} (config.json)"
    elif scale.shape not in fitting:
        yield f"{scale} does not fit {what} (config.json) over {list(shape)}"
    zero = parameters.get(ZERO)
    if zero is None and not scheme.symmetric:
        yield f"{codes.name} is asymmetric by config.json, but its {ZERO} is missing from the checkpoint: {DOWNLOAD}"
    if zero is not None:
        packed = (-(-rows * scheme.bits // 32), groups)
        if zero.dtype not in (I8, I32) or zero.shape != (packed if zero.dtype == I32 else scale.shape):
            yield f"{zero} does not fit a scale of {list(scale.shape)}"
    order = parameters.get(GROUPS)
    if order is not None and (order.dtype.kind != "i" or order.shape != (columns,)):
        yield f"{order} must be integers [{columns}]"
    stated = parameters.get(SHAPE)
    if stated is not None and (stated.dtype.kind != "i" or stated.shape != (2,)):
        yield f"{stated} must be two integers, not {dtype_name(stated.dtype)}"


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [CompressedTensorsFormat]
