"""The check of a preprocessor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ktforge.contract.checks import expected, expected_tensors, preprocessed
from ktforge.contract.stages import Preprocessor, Result
from ktforge.contract.tensors import BF16, Unit, UnitSpec
from ktforge.testing.common import (
    arrays_of,
    bound,
    check_config,
    check_plan_key,
    check_scratch,
    is_pending,
    kept,
    peak_of,
    read_only,
)
from ktforge.testing.units import weight_unit


def others() -> tuple[Unit, ...]:
    """Units that few preprocessors know: a norm's weight, and a table of integers that belongs to a model itself."""
    norm = weight_unit({"weight": np.linspace(0.5, 1.5, 64).astype(BF16)}, "model.layers.0.input_layernorm")
    table = weight_unit({"experts": np.arange(32, dtype=np.int64).reshape(8, 4)}, "model.tokens", None)
    return norm, table


def check_preprocessor(
    preprocessor: Preprocessor,
    unit: Unit,
    *,
    config: Mapping[str, Any] | None = None,
    unknown: Sequence[Unit] | None = None,
) -> list[Unit]:
    """Asserts that a preprocessor keeps its contract on ``unit``, and returns the units that it makes.

    Number, order, roles, dtypes and shapes are as planned, the same input gives the same bytes and stays as it is, and
    memory is what ``scratch_bytes`` says (of units that are much larger than 200 kB, that means something). Where
    ``rowwise`` is claimed, a part of a fused unit's experts gives that part of the same bytes. ``unknown`` are units
    that it leaves alone; by default a norm's weight and a table of integers.
    """
    stage = bound(preprocessor, config)
    made = _made(stage, read_only(unit))
    check_plan_key(stage, unit.spec, lambda spec: [*stage.plan(spec)])
    _check_unmade(stage, unit)
    if vars(type(stage)).get("rowwise", False):
        _check_rowwise(stage, read_only(unit), made)
    for other in others() if unknown is None else unknown:
        assert [*stage.plan(other.spec)] == [other.spec], f"{stage.name} does not leave {other.spec.name} alone"
        _check_same(stage, _made(stage, read_only(other)), [other], other.spec.name)
    check_config(stage, config, [Result(u.spec, renamed=u.spec.tensors) for u in made])
    return made


def _made(stage: Preprocessor, unit: Unit) -> list[Unit]:
    """What a bound stage makes of a unit, twice, within the memory that it names."""
    planned = _planned(stage, unit.spec)
    known = unit.spec.tensors if len(planned) == 1 else {}
    # While one of several is made, the one before may still be at hand.
    counted = min(2, len(planned)) * max((u.new_bytes(known) for u in planned), default=0)
    with kept():
        made = [Unit(u.spec, arrays_of(u)) for u in preprocessed(stage, [unit], planned)]
        _, peak = peak_of(lambda: _passed_on(preprocessed(stage, [unit], planned)))
        check_scratch(stage, peak, counted, stage.scratch_bytes(unit.spec))
        _check_same(stage, list(preprocessed(stage, [unit], planned)), made, unit.spec.name)
    return made


def _passed_on(units: Iterator[Unit]) -> None:
    """Takes units one by one, as ktforge does."""
    for unit in units:
        arrays_of(unit)


def _planned(stage: Preprocessor, unit: UnitSpec) -> tuple[UnitSpec, ...]:
    with kept():
        planned = tuple([expected(stage, made, UnitSpec, unit.name) for made in stage.plan(unit)])
        for made in planned:
            expected_tensors(stage, made.tensors.values(), unit.name)
    assert planned == (*stage.plan(unit),), f"{stage.name} plans {unit.name} in another way when it is asked again"
    names = [t.name for made in planned for t in made.tensors.values()]
    assert len(set(names)) == len(names), f"{stage.name} plans a tensor name twice: {names}"
    return planned


def _check_unmade(stage: Preprocessor, unit: Unit) -> None:
    planned = _planned(stage, unit.spec)
    said = set(stage.unmade(unit.spec))
    for made in preprocessed(stage, [read_only(unit)], planned):
        waiting = {role for role in made.spec.tensors if is_pending(made, role)}
        assert said <= waiting, f"unmade() of {stage.name} names {sorted(said - waiting)}, which it delivers made"


def _check_rowwise(stage: Preprocessor, unit: Unit, made: Sequence[Unit]) -> None:
    """Each row, or expert, by itself, as ktforge cuts them."""
    count = unit.spec.first_axis
    if not unit.spec.fused and made[0].spec != unit.spec:
        return  # only what it leaves alone is cut
    for row in range(count):
        part = _rows(unit, count, row)
        got = _made(stage, part)
        whole = [made[row]] if len(made) == count and unit.spec.fused else [_rows(u, count, row) for u in made]
        _check_same(stage, got, whole, f"row {row} of {unit.spec.name}, which rowwise says it treats by itself")


def _rows(unit: Unit, count: int, row: int) -> Unit:
    """One row of whatever has so many."""
    cut = {r: a[row : row + 1] if a.shape[:1] == (count,) else a for r, a in unit.tensors.items()}
    specs = {r: t._replace(shape=cut[r].shape) for r, t in unit.spec.tensors.items()}
    return Unit(unit.spec.with_tensors(specs), cut)


def _check_same(stage: Preprocessor, got: Sequence[Unit], wanted: Sequence[Unit], what: str) -> None:
    assert len(got) == len(wanted), f"{stage.name} makes {len(got)} units of {what}, and made {len(wanted)}"
    for one, other in zip(got, wanted, strict=True):
        for role, array in arrays_of(other).items():
            same = one.tensors[role].tobytes() == array.tobytes()
            assert same, f"{stage.name} gives other bytes for {role} of {what}"
