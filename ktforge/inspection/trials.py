"""What many pipelines would make of one checkpoint, each asked about one unit of every kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktforge.contract.plan import PlannedUnit, Recipe, results_of
from ktforge.contract.stages import PlanKey, Stage
from ktforge.contract.tensors import UnitSpec
from ktforge.errors import CheckpointError, Problems, Unsupported
from ktforge.model.grouping import Grouping
from ktforge.model.mtp import check_extra
from ktforge.model.source import Source
from ktforge.planning.kinds import plan_keys, told_apart
from ktforge.planning.plan import check_dense
from ktforge.planning.targets import Targets
from ktforge.planning.unit import edited_config, later_refusals, plan_unit

_NUMBER = re.compile(r"\d+")

#: A unit that stands for others, and how many they are.
Kind = tuple[UnitSpec, int]


@dataclass(frozen=True)
class Kinds:
    """One unit for all that store the same things in the same shapes under names that differ in numbers alone, and how
    many they are: a checkpoint has 20,000 experts of one kind, and what can be made of one can be made of all.

    ``units`` are the model's own, ``extra`` the multi-token-prediction layers', ``gaps`` what these lack.
    """

    source: Source
    units: tuple[Kind, ...]
    extra: tuple[Kind, ...]
    gaps: tuple[str, ...]

    @classmethod
    def of(cls, source: Source, grouping: Grouping, asked: Recipe) -> Kinds:
        """The kinds of a source's units. Those that the preprocessors of ``asked`` tell apart are different kinds."""
        keys = plan_keys(asked.bound(source.config).preprocess) or []
        extra = Grouping(extra=grouping.extra)
        check_extra(extra, source.model, source.config)
        own = kinds_of([*grouping.others, *grouping.experts], keys)
        return cls(source, own, kinds_of(grouping.extra, keys), extra.problems.lines())

    def refusals(self, pipeline: Recipe) -> tuple[str, ...]:
        """Why ``pipeline`` cannot be run on this source, in the words of its plan; empty if it can."""
        try:
            check_dense(pipeline, self.source.model)
        except CheckpointError as refusal:
            return refusal.problems
        if pipeline.keeps_mtp:
            return (*self.gaps, *self._refusals(pipeline, (*self.units, *self.extra)))
        return self._refusals(pipeline, self.units)

    def unreadable(self, pipeline: Recipe) -> tuple[str, ...]:
        """The same of the model's own units, whether or not there are experts for it."""
        return self._refusals(pipeline, self.units)

    def _refusals(self, pipeline: Recipe, kinds: Sequence[Kind]) -> tuple[str, ...]:
        problems = Problems()
        bound = pipeline.bound(self.source.config)
        planned = self._planned(bound, kinds, problems)
        edited_config(bound, self.source.config, list(results_of(planned)), problems)
        return problems.lines()

    def changed_by(self, pipeline: Recipe) -> bool:
        """Whether the pipeline's preprocessors make something else of any unit."""
        planned = self._planned(pipeline.bound(self.source.config), self.units, Problems())
        return any(unit.steps and unit.steps[-1] != (unit.source,) for unit in planned)

    def _planned(self, bound: Recipe, kinds: Sequence[Kind], problems: Problems) -> list[PlannedUnit]:
        planned = []
        targets = Targets(bound.quantize, bound.rules, dense=self.source.model.experts == 0)
        for unit, count in kinds:
            try:
                planned.append(plan_unit(bound, unit, self.source.model, targets))
            except Unsupported as refusal:
                for problem in (*refusal.problems, *later_refusals(bound, unit, self.source.model, targets)):
                    for _ in range(count):  # that it says how many they are
                        problems.add(unit.shorten(problem), unit.name)
        return planned


def kinds_of(units: Iterable[UnitSpec], keys: Sequence[tuple[Stage, PlanKey]] = ()) -> tuple[Kind, ...]:
    """The first unit of each kind, in their order, and how many there are; ``keys`` tell kinds apart, too."""
    found: dict[object, list[UnitSpec]] = {}
    for unit in units:
        stored = [t[1:3] for t in unit.tensors.values()]  # dtype and shape
        apart = told_apart(unit, keys) if keys else ()
        kind = (_NUMBER.sub("#", unit.name), unit.expert is None, unit.fused, apart, *unit.tensors, *stored)
        found.setdefault(kind, []).append(unit)
    return tuple((same[0], len(same)) for same in found.values())
