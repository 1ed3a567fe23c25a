"""Whose fault it is: what a stage plans and delivers is compared with its contract, and its errors bear its name."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path, PurePosixPath
from typing import TypeVar

import numpy as np

from ktforge.contract.pending import Pending, pending
from ktforge.contract.stages import Layout, Preprocessor, Stage
from ktforge.contract.tensors import QuantPart, QuantSpec, QuantUnit, TensorSpec, Unit, UnitSpec, dtype_name
from ktforge.errors import CheckpointError, KtforgeError, PluginError

T = TypeVar("T")
#: The longest tensor name in use has about 100 characters, and no tensor more than 5 dimensions.
NAME_LIMIT = 500
DIMENSION_LIMIT = 16


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


def expected_quant(stage: Stage, spec: object, subject: str) -> QuantSpec:
    """``spec`` itself. Raises PluginError if a quantizer planned no QuantSpec, or codes and groups of no size."""
    quant = expected(stage, spec, QuantSpec, subject)
    size, bits = quant.group_size, quant.bits
    if not (isinstance(bits, int) and 2 <= bits <= 8) or not (size is None or (isinstance(size, int) and size > 0)):
        raise PluginError(
            f"{owner(stage)} planned codes of {bits} bits in groups of {size} for {subject}; 2 to 8 bits were expected "
            "and a size above 0, or None for a scale a row"
        )
    return quant


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raises CheckpointError with a sentence for each tensor, 20 at most, whose name or shape makes no sense.

    Raises TypeError for a loader's mistake.
    """
    shapes = [spec.shape for spec in specs]
    if not set(map(type, shapes)) <= {tuple}:
        raise TypeError("the shape of a TensorSpec is a tuple")
    if _sound([spec.name for spec in specs]) and max(map(len, shapes), default=0) <= DIMENSION_LIMIT:
        return
    problems = []
    for spec in specs:
        where = f"{spec.file}: " if spec.file is not None else ""
        name = spec.name
        if not name or len(name) > NAME_LIMIT:
            problems.append(
                f"{where}a tensor has a name of {len(name):,} characters ({name[:40]!r}): the file is broken"
            )
        elif not _sound([name]):
            problems.append(f"{where}{name!r} is no tensor's name: rename it, or get the file from someone you trust")
        elif len(spec.shape) > DIMENSION_LIMIT:
            problems.append(f"{where}{name} has {len(spec.shape):,} dimensions: the file is broken")
    raise CheckpointError(*problems[:20])


def _sound(names: Sequence[str]) -> bool:
    """All in one go: one by one takes ten times as long, and there are 100,000."""
    text = " ".join(names)
    lengths = set(map(len, names))
    return text.isprintable() and "/" not in text and ".." not in text and lengths <= set(range(1, NAME_LIMIT + 1))


def check_paths(paths: Iterable[str]) -> None:
    """Raises PluginError for a file of an output that would lie outside its folder."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise PluginError(f"the writer planned a file called {path[:200]!r}, which is outside the output folder")


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


def with_delegates(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Stages, and those that they leave work to."""
    for stage in stages:
        yield stage
        with blame(stage, "the stages that it leaves work to"):
            delegates = list(stage.delegates())
        yield from with_delegates(delegates)


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


def preprocessed(stage: Preprocessor, units: Iterable[Unit], planned: Sequence[UnitSpec]) -> Iterator[Unit]:
    """What a preprocessor makes of units, one at a time, of which it keeps none.

    Raises PluginError if they are not those that it planned.
    """
    specs = iter(planned)
    for unit in units:
        with blame(stage, unit.spec.name):
            made = iter(stage.apply(unit))  # which works at once, if it is no generator
        while True:
            with blame(stage, unit.spec.name):
                result = next(made, None)
            if result is None:
                break
            spec = next(specs, None)
            if spec is None:
                raise PluginError(f"{owner(stage)} made more units of {unit.spec.name} than it planned")
            yield delivered(stage, result, spec)
            del result  # before the next one is made, beside which there is no room for it
        del unit
    if next(specs, None) is not None:
        raise PluginError(f"{owner(stage)} made fewer units than it planned for {planned[0].name}")


def delivered_parts(stage: Stage, unit: object, spec: QuantSpec, layout: Layout, *, trust: bool = True) -> QuantUnit:
    """The quantised unit that a quantizer delivered, or a layout unpacked. Raises PluginError if its arrays are not as
    ``spec`` planned them, codes do not fit their bits, or scales are nothing that ``layout`` may store.

    ``trust`` passes over the values of a quantizer that is ``trusted``.
    """
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
        if not (trust and vars(type(stage)).get("trusted", False)):
            _check_values(stage, name, got, spec.bits, signed=layout.signed_scales)
    return unit


def _check_values(stage: Stage, name: str, part: QuantPart, bits: int, *, signed: bool) -> None:
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
