"""Whose fault it is: what a stage plans and delivers is compared with its contract, and its errors bear its name."""

from __future__ import annotations

import importlib.metadata
import sys
import traceback
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import TypeVar

import numpy as np

from ktforge.contract.pending import Pending, pending
from ktforge.contract.stages import Quantizer, Stage
from ktforge.contract.tensors import QuantSpec, QuantUnit, TensorSpec, Unit, UnitSpec, dtype_name
from ktforge.errors import KtforgeError, PluginError

T = TypeVar("T")


def one_line(error: BaseException) -> str:
    """The exception in one line: pluggy's and pydantic's have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def owner(stage: Stage) -> str:
    """Whose code a stage is: name, stage, and the distribution that ships its module."""
    module = type(stage).__module__
    top = module.partition(".")[0]
    dists = importlib.metadata.packages_distributions().get(top, [])
    where = f"{dists[0]} {importlib.metadata.version(dists[0])}" if dists else module
    return f"plugin {type(stage).name} ({where}, {stage.stage})"


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


def _place(stage: Stage, error: Exception) -> str:
    """Where in the plugin's own file it happened; "" if the file has no frame in the traceback."""
    module = sys.modules.get(type(stage).__module__)
    file = getattr(module, "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""


class blame:
    """Turns an unexpected exception from a stage's code into a PluginError that names stage and subject.

    A class, since a plan enters it a hundred thousand times and a generator takes three times as long.
    """

    __slots__ = ("_stage", "_subject")

    def __init__(self, stage: Stage, subject: str) -> None:
        self._stage, self._subject = stage, subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, cls: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, KtforgeError):
            where = _place(self._stage, error)
            raise PluginError(f"{owner(self._stage)} failed on {self._subject}: {one_line(error)}{where}") from error


def delivered(stage: Stage, unit: Unit, spec: UnitSpec) -> Unit:
    if unit.tensors.keys() != spec.tensors.keys():
        got, planned = sorted(unit.tensors), sorted(spec.tensors)
        raise PluginError(f"{owner(stage)} delivered {got} of {spec.name}; {planned} were planned")
    for role, tensor in spec.tensors.items():
        waiting = pending(unit.tensors, role)
        array = unit.tensors[role] if waiting is None else waiting
        _check_array(stage, tensor.name, array, tensor.dtype, tensor.shape)
    return Unit(spec, unit.tensors)


def delivered_parts(stage: Quantizer, unit: QuantUnit, spec: QuantSpec) -> None:
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


def _check_array(stage: Stage, name: str, array: np.ndarray | Pending, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    is_array = isinstance(array, np.ndarray | Pending)
    if not is_array or array.dtype != dtype or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__
        raise PluginError(f"{owner(stage)} delivered {name} as {got}; {dtype_name(dtype)} {list(shape)} was planned")
