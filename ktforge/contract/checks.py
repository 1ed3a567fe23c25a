"""Whose fault it is: what a stage plans and delivers is compared with its contract, and its errors bear its name."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import traceback
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import numpy as np

from ktforge.contract.pending import Pending, pending
from ktforge.contract.stages import Layout, Quantizer, Stage
from ktforge.contract.tensors import QuantPart, QuantSpec, QuantUnit, TensorSpec, Unit, UnitSpec, dtype_name
from ktforge.errors import KtforgeError, PluginError

T = TypeVar("T")


def one_line(error: BaseException) -> str:
    """The exception in one line: pluggy's and pydantic's have several."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # an exception of a plugin's may fail at saying what it is
        text = "it cannot say why"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def owner(stage: Stage | type[Stage]) -> str:
    """Whose code a stage is: name, stage, and the distribution that ships its module."""
    cls = _class(stage)
    module = cls.__module__
    top = module.partition(".")[0]
    dists = importlib.metadata.packages_distributions().get(top, [])
    where = f"{dists[0]} {importlib.metadata.version(dists[0])}" if dists else module
    return f"plugin {cls.name} ({where}, {cls.stage})"


def _class(stage: Stage | type[Stage]) -> type[Stage]:
    return stage if isinstance(stage, type) else type(stage)


def expected(stage: Stage, value: object, cls: type[T], subject: str) -> T:
    """``value`` itself. Raises PluginError if a stage planned something else than a ``cls``."""
    if not isinstance(value, cls):
        raise PluginError(f"{owner(stage)} planned {type(value).__name__} for {subject}; {cls.__name__} was expected")
    return value


def expected_tensors(stage: Stage, tensors: Iterable[TensorSpec], subject: str) -> None:
    """Raises PluginError if a stage planned a tensor that no file could hold, such as one of half a row."""
    for tensor in tensors:
        expected(stage, tensor, TensorSpec, subject)
        name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
        sizes = isinstance(shape, tuple) and all(isinstance(n, Integral) and n >= 0 for n in shape)
        if not (sizes and isinstance(name, str) and isinstance(dtype, np.dtype)):
            raise PluginError(
                f"{owner(stage)} planned {str((name, dtype, shape))[:300]} for {subject}; a name, a numpy dtype and a "
                "tuple of sizes were expected"
            )


def _place(stage: Stage | type[Stage], error: BaseException) -> str:
    """Where in the plugin's own file it happened; "" if the file has no frame in the traceback."""
    module = sys.modules.get(_class(stage).__module__)
    file = getattr(module, "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""


class blame:
    """Turns an unexpected exception from the code of a stage (or its class) into a PluginError that names stage and
    subject.

    A class, since a plan enters it a hundred thousand times and a generator takes three times as long.
    """

    __slots__ = ("_stage", "_subject")

    def __init__(self, stage: Stage | type[Stage], subject: str) -> None:
        self._stage, self._subject = stage, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and is_blamed(error):
            where = _place(self._stage, error)
            raise PluginError(f"{owner(self._stage)} failed on {self._subject}: {one_line(error)}{where}") from error


def is_blamed(error: BaseException) -> bool:
    """Whether an exception from a plugin's code is the plugin's fault: all are, ``sys.exit()`` too, but refusals, and
    Ctrl-C, which comes in the main thread alone."""
    if isinstance(error, KtforgeError | GeneratorExit):
        return False
    return not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread()


def delivered(stage: Stage, unit: object, spec: UnitSpec) -> Unit:
    """The unit that a loader or preprocessor delivered. Raises PluginError if it is not as ``spec`` planned it."""
    if not isinstance(unit, Unit):
        raise PluginError(f"{owner(stage)} delivered {type(unit).__name__} for {spec.name}; a Unit was planned")
    if unit.tensors.keys() != spec.tensors.keys():
        got, planned = sorted(unit.tensors), sorted(spec.tensors)
        raise PluginError(f"{owner(stage)} delivered {got} of {spec.name}; {planned} were planned")
    for role, tensor in spec.tensors.items():
        waiting = pending(unit.tensors, role)
        array = unit.tensors[role] if waiting is None else waiting
        _check_array(stage, tensor.name, array, tensor.dtype, tensor.shape)
    return Unit(spec, unit.tensors)


def delivered_parts(stage: Quantizer, unit: object, spec: QuantSpec, layout: Layout) -> QuantUnit:
    """The quantised unit that a quantizer delivered. Raises PluginError if its arrays are not as ``spec`` planned them,
    codes do not fit their bits, or scales are nothing that ``layout`` may store."""
    if not isinstance(unit, QuantUnit):
        raise PluginError(
            f"{owner(stage)} delivered {type(unit).__name__} for {spec.unit.name}; a QuantUnit was planned"
        )
    if len(unit.parts) != len(spec.parts):
        raise PluginError(
            f"{owner(stage)} delivered {len(unit.parts)} parts of {spec.unit.name}; {len(spec.parts)} were planned"
        )
    for part, got in zip(spec.parts, unit.parts, strict=True):
        name = f"{spec.unit.name} {part.projection} {part.index}"
        groups = (part.shape[0], spec.groups(part))
        _check_array(stage, f"the codes of {name}", got.codes, np.dtype(np.int8), part.shape)
        _check_array(stage, f"the scales of {name}", got.scales, spec.scale_dtype, groups)
        if spec.symmetric != (got.zeros is None):
            raise PluginError(f"{owner(stage)}: zero points of {name} do not fit symmetric={spec.symmetric}")
        if got.zeros is not None:
            _check_array(stage, f"the zero points of {name}", got.zeros, np.dtype(np.int8), groups)
        if not vars(type(stage)).get("trusted", False):
            _check_values(stage, name, got, spec.bits, signed=layout.signed_scales)
    return unit


def _check_values(stage: Quantizer, name: str, part: QuantPart, bits: int, *, signed: bool) -> None:
    highest = (1 << (bits - 1)) - 1
    for what, codes in (("codes", part.codes), ("zero points", part.zeros)):
        if codes is None or not codes.size or bits >= 8:
            continue
        least, most = int(codes.min()), int(codes.max())
        if least < -highest - 1 or most > highest:
            raise PluginError(
                f"{owner(stage)} delivered the {what} of {name} from {least} to {most}; {bits} bits hold "
                f"{-highest - 1} to {highest}"
            )
    scales = part.scales.astype(np.float32, copy=False)
    if not np.isfinite(scales).all():
        raise PluginError(f"{owner(stage)} delivered the scales of {name} with NaN or infinity among them")
    if not signed and (scales < 0).any():
        raise PluginError(f"{owner(stage)} delivered the scales of {name} with negative ones, which no reader expects")


def _check_array(stage: Stage, name: str, array: np.ndarray | Pending, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    is_array = isinstance(array, np.ndarray | Pending)
    if not is_array or array.dtype != dtype or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__
        raise PluginError(f"{owner(stage)} delivered {name} as {got}; {dtype_name(dtype)} {list(shape)} was planned")
