"""What the checks have in common."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np

from ktforge.contract.checks import expected
from ktforge.contract.pending import pending
from ktforge.contract.plan import STAGES
from ktforge.contract.stages import Result, Stage
from ktforge.contract.tensors import Unit, UnitSpec
from ktforge.errors import PluginError

T = TypeVar("T")
AnyStage = TypeVar("AnyStage", bound=Stage)
#: Python's own objects, which no stage need count.
SLACK = 200_000
#: Numbers of layer and expert that stand nowhere else in a name, odd and even.
_NUMBERS = (("900000001", "900000004"), ("800000002", "800000003"))


@contextmanager
def kept() -> Iterator[None]:
    """What ktforge would blame a plugin for, as an AssertionError."""
    try:
        yield
    except PluginError as error:
        raise AssertionError(str(error)) from error


def bound(stage: AnyStage, config: Mapping[str, Any] | None) -> AnyStage:
    """The stage told of config.json, which it must leave as it is."""
    given = dict(config or {})
    before = deepcopy(given)
    with kept():
        base = next(base for base in STAGES if isinstance(stage, base))
        told: Any = expected(stage, stage.bind(given), base, "config.json")
    assert given == before, f"bind() of {stage.name} changes the config that it is given"
    missing = [path for path in told.input_files() if not path.is_file()]
    assert not missing, f"input_files() of {stage.name} names {missing[0]}, which is no file"
    return told


def check_config(stage: Stage, config: Mapping[str, Any] | None, results: Sequence[Result]) -> Mapping[str, Any]:
    """Asserts that a bound stage leaves the config that it edits as it is, and returns what it makes of it."""
    given = dict(config or {})
    before = deepcopy(given)
    edited = stage.edit_config(given, results)
    assert isinstance(edited, Mapping), f"edit_config() of {stage.name} gives {type(edited).__name__}, no mapping"
    json.dumps(dict(edited))
    assert given == before, f"edit_config() of {stage.name} changes the config that it is given"
    return edited


def check_plan_key(stage: Stage, unit: UnitSpec, plan: Callable[[UnitSpec], object]) -> None:
    """Asserts that units which the stage calls alike get plans that differ in the numbers of layer and expert alone."""
    key = stage.plan_key() if "plan_key" in vars(type(stage)) else None
    if key is None or unit.layer is None:
        return
    one, other = (_renumbered(unit, *numbers) for numbers in _NUMBERS)
    if key(one) != key(other):
        return
    text = repr(plan(one))
    for old, new in zip(*_NUMBERS, strict=True):
        text = text.replace(old, new)
    assert text == repr(plan(other)), f"plan_key() of {stage.name} calls units alike that it plans in another way"


def _renumbered(unit: UnitSpec, layer: str, number: str) -> UnitSpec:
    def renamed(name: str) -> str:
        before, _, behind = f"{name}.".partition(f".{unit.layer}.")
        if unit.is_expert:
            behind = behind.replace(f".{unit.expert}.", f".{number}.", 1)
        return f"{before}.{layer}.{behind}".rstrip(".")

    tensors = {role: t._replace(name=renamed(t.name)) for role, t in unit.tensors.items()}
    expert = int(number) if unit.is_expert else None
    return UnitSpec(renamed(unit.name), tensors, int(layer), expert, unit.fused)


def read_only(unit: Unit) -> Unit:
    """The unit as it comes from a mapped file, which nobody may write to."""
    return Unit(unit.spec, {role: frozen(array) for role, array in unit.tensors.items()})


def frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether both have one dtype and shape, and the same bytes."""
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def arrays_of(unit: Unit) -> dict[str, np.ndarray]:
    """The unit's arrays, made now if they were to be made when somebody asks for them."""
    return {role: unit.tensors[role] for role in unit.spec.tensors}


def is_pending(unit: Unit, role: str) -> bool:
    return pending(unit.tensors, role) is not None


def peak_of(work: Callable[[], T]) -> tuple[T, int]:
    """What ``work`` gives, and the most bytes at once that Python and numpy have taken for it."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        return work(), tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()


def check_scratch(stage: Stage, peak: int, counted: int, said: int) -> None:
    """Asserts that no more memory was taken than the ``counted`` bytes of arrays and what ``scratch_bytes`` says."""
    needed = peak - counted
    assert needed <= said + SLACK, (
        f"scratch_bytes() of {stage.name} says {said:,}, and {needed:,} bytes were needed beside what is planned"
    )
