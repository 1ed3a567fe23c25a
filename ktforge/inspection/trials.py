"""What many pipelines would make of one checkpoint, each asked about a few units that stand for all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktforge.contract.plan import PlannedUnit, Recipe, results_of
from ktforge.contract.stages import PlanKey, Stage
from ktforge.contract.tensors import UnitSpec
from ktforge.errors import CheckpointError, Problems, Unsupported
from ktforge.model.mtp import check_extra
from ktforge.model.source import Source
from ktforge.model.units import ModelUnits
from ktforge.planning.kinds import plan_keys, told_apart
from ktforge.planning.plan import check_dense
from ktforge.planning.targets import Targets
from ktforge.planning.unit import edited_config, later_refusals, plan_unit

_NUMBER = re.compile(r"\d+")
#: A unit that stands for others, and how many they are.
Sample = tuple[UnitSpec, int]


@dataclass(frozen=True)
class Samples:
    """One unit for all that store the same things in the same shapes under names that differ in numbers alone, and how
    many they are: a checkpoint has 20,000 experts alike, and what can be made of one can be made of all.

    ``units`` are the model's own, ``extra`` the multi-token-prediction layers', ``gaps`` what these lack.
    """

    source: Source
    units: tuple[Sample, ...]
    extra: tuple[Sample, ...]
    gaps: tuple[str, ...]

    @classmethod
    def of(cls, source: Source, units: ModelUnits, asked: Recipe) -> Samples:
        """Samples of a source's units, one of those that the preprocessors of ``asked`` do not tell apart."""
        keys = plan_keys(asked.bound(source.known).preprocess) or []
        extra = ModelUnits(extra=units.extra)
        check_extra(extra, source.model, source.config)
        own = samples_of([*units.others, *units.experts], keys)
        return cls(source, own, samples_of(units.extra, keys), extra.problems.lines())

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

    def _refusals(self, pipeline: Recipe, samples: Sequence[Sample]) -> tuple[str, ...]:
        problems = Problems()
        bound = pipeline.bound(self.source.known)
        planned = self._planned(bound, samples, problems)
        edited_config(bound, self.source.config, list(results_of(planned)), problems)
        return problems.lines()

    def changed_by(self, pipeline: Recipe) -> bool:
        """Whether the pipeline's preprocessors make something else of any unit."""
        planned = self._planned(pipeline.bound(self.source.known), self.units, Problems())
        return any(unit.steps and unit.steps[-1] != (unit.source,) for unit in planned)

    def _planned(self, bound: Recipe, samples: Sequence[Sample], problems: Problems) -> list[PlannedUnit]:
        planned = []
        targets = Targets(bound.quantize, bound.rules, dense=self.source.model.experts == 0)
        for unit, count in samples:
            try:
                planned.append(plan_unit(bound, unit, self.source.model, targets))
            except Unsupported as refusal:
                for problem in (*refusal.problems, *later_refusals(bound, unit, self.source.model, targets)):
                    for _ in range(count):  # that it says how many they are
                        problems.add(unit.shorten(problem), unit.name)
        return planned


def samples_of(units: Iterable[UnitSpec], keys: Sequence[tuple[Stage, PlanKey]] = ()) -> tuple[Sample, ...]:
    """The first of units that store the same, in their order, and how many they are; ``keys`` tell more apart."""
    found: dict[object, list[UnitSpec]] = {}
    for unit in units:
        stored = [(t.dtype, t.shape) for t in unit.tensors.values()]
        apart = told_apart(unit, keys) if keys else ()
        like = (_NUMBER.sub("#", unit.name), unit.expert is None, unit.fused, apart, *unit.tensors, *stored)
        found.setdefault(like, []).append(unit)
    return tuple((same[0], len(same)) for same in found.values())
