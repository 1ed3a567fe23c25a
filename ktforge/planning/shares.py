"""Pieces of a unit that is too large to be worked on at once, and the memory that one piece takes.

A unit is cut along the first axis of its tensors: a layer's fused experts one by one, a large tensor that is only
copied a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ktforge.contract.checks import blame
from ktforge.contract.plan import PlannedUnit, Recipe
from ktforge.contract.stages import Result
from ktforge.contract.tensors import TensorSpec, UnitSpec

#: Bytes of a tensor that is only copied, at a time: a few milliseconds, beside which a call in Python is nothing.
COPIED = 32 * 1000 * 1000

Steps = Sequence[tuple[UnitSpec, ...]]
Results = Sequence[tuple[Result, ...]]


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does at a time: a unit, or some ``rows`` of the first axis of its tensors.

    ``planned`` is what is read and made of them; tensors of the output are whole there, ``row`` is where in them the
    share's own rows begin. It is None if the share makes whole tensors.
    """

    unit: PlannedUnit
    planned: PlannedUnit
    row: int | None = None


def shares(recipe: Recipe, unit: PlannedUnit) -> Iterator[Share]:
    """The shares of a unit, in the order in which its data lies in the files."""
    return (share(recipe, unit, number) for number in range(unit.shares))


def share(recipe: Recipe, unit: PlannedUnit, number: int) -> Share:
    """One of a unit's ``unit.shares``."""
    if not unit.share_rows:
        return Share(unit, unit)
    start = number * unit.share_rows
    return _share(recipe, unit, start, min(unit.source.first_axis, start + unit.share_rows))


def share_rows(recipe: Recipe, source: UnitSpec, steps: Steps, results: Results) -> int:
    """Rows of the first axis that are worked on at a time; 0 if the unit is worked on as a whole.

    It is where a stage may look at all of them, or the loader reads no less than a whole tensor; and where a tensor is
    empty, since its rows cannot be told apart by their bytes.
    """
    count = source.first_axis
    if count < 2 or not all(vars(type(stage)).get("rowwise", False) for stage in recipe.preprocess):
        return 0
    if not all(tensor.nbytes for tensor in source.tensors.values()):
        return 0
    for tensor in source.tensors.values():
        with blame(recipe.loader, tensor.name):
            if _has_axis(tensor, count) and recipe.loader.rows(tensor, 0, 1) is None:
                return 0
    if len(results) == 1:
        whole = all(r.quant is None and all(_has_axis(t, count) for t in r.outputs) for r in results[0])
        if not whole or not (source.fused or all(step == (source,) for step in steps)):
            return 0
    elif not source.fused or len(results) != count or any(len(step) not in (1, count) for step in steps):
        return 0
    rows = 1 if source.fused else max(1, COPIED * count // max(1, source.nbytes))
    return rows if rows < count else 0


def working_bytes(recipe: Recipe, unit: PlannedUnit) -> int:
    """Bytes of all arrays that may live while a share of the unit is worked on, mapped source pages included.

    An upper bound: views are counted as if they were copies. What preprocessors split passes through the stages behind
    them one unit at a time. All shares read as much, but a rule may make more of one of them than of the first.
    """
    first = share(recipe, unit, 0).planned
    total = first.source.nbytes
    with blame(recipe.loader, unit.source.name):
        moment = max((recipe.loader.scratch_bytes(t) for t in first.source.tensors.values()), default=0)
    before: tuple[UnitSpec, ...] = (first.source,)
    fused = bool(unit.results) and all(r.fused for results in unit.results for r in results)
    for stage, step in zip(recipe.preprocess, first.steps, strict=True):
        with blame(stage, unit.source.name):
            moment = max(moment, *(stage.scratch_bytes(u) for u in before))
            unmade = stage.unmade(before[0]) if fused and step is first.steps[-1] else ()
        known = before[0].tensors if len(before) == len(step) else {}
        total += max((u.new_bytes(known, unmade) for u in step), default=0)
        before = step
    return total + moment + max((sum(_result_bytes(recipe, r) for r in results) for results in unit.results), default=0)


def _share(recipe: Recipe, unit: PlannedUnit, start: int, stop: int) -> Share:
    count = unit.source.first_axis
    source = unit.source.with_tensors(
        {
            role: recipe.loader.rows(t, start, stop) or t if _has_axis(t, count) else t
            for role, t in unit.source.tensors.items()
        }
    )
    split = len(unit.results) == count
    steps = tuple(
        (step[start],) if len(step) == count else (_cut(step[0], count, stop - start),) for step in unit.steps
    )
    results = (unit.results[start],) if split else unit.results
    planned = unit._replace(source=source, steps=steps, results=results, share_rows=0)
    return Share(unit, planned, None if split else start)


def _cut(unit: UnitSpec, count: int, rows: int) -> UnitSpec:
    return unit.with_tensors(
        {r: t._replace(shape=(rows, *t.shape[1:])) if _has_axis(t, count) else t for r, t in unit.tensors.items()}
    )


def _has_axis(tensor: TensorSpec, count: int) -> bool:
    return tensor.shape[:1] == (count,)


def _result_bytes(recipe: Recipe, result: Result) -> int:
    """Buffers, what a quantizer delivers unless the layout does its work too, and what either needs for a moment."""
    quantizer, layout, quant, packed = result.quantizer, recipe.layout, result.quant, result.packed
    if quantizer is None or layout is None or quant is None or packed is None:
        return 0
    with blame(layout, result.unit.name):
        moment = layout.scratch_bytes(quant)
    if result.fused:
        return packed.nbytes + moment
    with blame(quantizer, result.unit.name):
        moment = max(moment, quantizer.scratch_bytes(result.unit, quant))
    return packed.nbytes + moment + quant.nbytes
