"""The whole run, known before the first weight is read: units, output tensors, files, memory, and every refusal."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktforge.checkpoint import CONFIG, read_json
from ktforge.dense import check_dense
from ktforge.diskspace import shortages
from ktforge.errors import PlanError, Problems, Unsupported
from ktforge.grouping import check_extra, check_shapes, group
from ktforge.modelconfig import ModelConfig
from ktforge.output import check_output, outlook
from ktforge.registry import blame, planned
from ktforge.rules import Targets
from ktforge.sizes import size_text
from ktforge.source import read_source
from ktforge.stages import Fused, Preprocessor, Quantizer
from ktforge.tensors import Demand, FileSpec, PackedSpec, QuantSpec, SourceFile, TensorSpec, UnitSpec

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Result:
    """What becomes of one unit behind the preprocessors: it is packed, or its tensors are renamed.

    ``fused`` quantises and packs in one step; None where that takes two.

    ``renamed`` maps roles to output tensors; a role that is missing there is left out.
    """

    unit: UnitSpec
    quantizer: Quantizer | None = None
    quant: QuantSpec | None = None
    packed: PackedSpec | None = None
    fused: Fused | None = None
    renamed: Mapping[str, TensorSpec] | None = None

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        if self.packed is not None:
            return self.packed.tensors
        return tuple((self.renamed or {}).values())


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit as the loader finds it, the units that each preprocessor makes of it, and the last ones' results.

    A unit has several results where rules treat its projections differently.
    """

    source: UnitSpec
    steps: tuple[tuple[UnitSpec, ...], ...]
    results: tuple[tuple[Result, ...], ...]

    @property
    def outputs(self) -> Iterator[TensorSpec]:
        return (tensor for results in self.results for result in results for tensor in result.outputs)

    @property
    def working_bytes(self) -> int:
        """Bytes of all arrays that may live while this unit is worked on, mapped source pages included.

        What preprocessors split passes through the stages behind them one unit at a time.
        """
        total = self.source.nbytes // max(1, len(self.results))
        before: Sequence[UnitSpec] = (self.source,)
        for step in self.steps:
            total += max((u.nbytes for u in step if u not in before), default=0)
            before = step
        return total + max((sum(map(_result_bytes, results)) for results in self.results), default=0)


def _result_bytes(result: Result) -> int:
    packed = sum(t.nbytes for t in result.outputs) if result.packed else 0
    two_steps = result.quant.parts if result.quant and not result.fused else ()
    return packed + sum(p.shape[0] * p.shape[1] for p in two_steps)


@dataclass(frozen=True)
class Plan:
    """What a run will do. ``problems`` holds one sentence per refusal; a plan with any cannot be run.

    ``config_json`` is the output's config.json, None if the source has none to give. ``left_out`` are the tensors of
    the source that are in no output, whole layers beyond the model's among them.
    """

    pipeline: Pipeline
    model: ModelConfig
    units: tuple[PlannedUnit, ...]
    files: tuple[FileSpec, ...]
    config_json: bytes | None
    side_files: tuple[Path, ...]
    sources: tuple[SourceFile, ...]
    left_out: tuple[TensorSpec, ...]
    problems: tuple[str, ...]

    def check(self) -> None:
        """Raises PlanError with all problems, if there are any."""
        if self.problems:
            raise PlanError(*self.problems)

    def check_memory(self, limit: int | None) -> None:
        """Raises PlanError if a unit alone needs more than ``limit`` bytes (None: no limit)."""
        largest = max(self.units, key=lambda u: u.working_bytes, default=None)
        if limit is not None and largest is not None and largest.working_bytes > limit:
            megabytes = -(-largest.working_bytes // 10**6)
            raise PlanError(
                f"{largest.source.name} needs {size_text(largest.working_bytes)}, more than the memory limit of "
                f"{size_text(limit)}: allow {megabytes:,} MB or more"
            )

    @cached_property
    def source_bytes(self) -> int:
        return sum(u.source.nbytes for u in self.units)

    @cached_property
    def output_bytes(self) -> int:
        return sum(f.nbytes for f in self.files)

    @cached_property
    def expert_units(self) -> int:
        return sum(u.source.experts for u in self.units)

    @property
    def results(self) -> Iterator[Result]:
        """What becomes of every unit, in their order."""
        return _results(self.units)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The layouts' formats in the output, such as kt-amx-int4/1."""
        return tuple(sorted({r.packed.format for r in self.results if r.packed}))

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The quantizers' methods, such as absmax-int4/1."""
        return tuple(sorted({r.quant.method for r in self.results if r.quant}))

    def outlook(self) -> str | None:
        """What a run would do about what its output folder holds already; None if there is nothing, or no plan."""
        folder = self.pipeline.writer.folder()
        return None if folder is None or self.problems else outlook(folder, self)

    def peak_memory(self, workers: int) -> int:
        """Bytes of all units in flight at the worst moment; the interpreter and its libraries come on top."""
        return sum(sorted((u.working_bytes for u in self.units), reverse=True)[:workers])


def make_plan(pipeline: Pipeline) -> Plan:
    """Plans a run from headers and config.json. Refusals end up in ``problems``.

    Raises CheckpointError if the checkpoint cannot be read at all.
    """
    with _without_collection():
        return _make_plan(pipeline)


@contextmanager
def _without_collection() -> Iterator[None]:
    """A plan is hundreds of thousands of objects without a cycle; looking for cycles took a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _make_plan(pipeline: Pipeline) -> Plan:
    source = read_source(pipeline.loader)
    config, model = source.config, source.model
    check_dense(pipeline, model)
    grouping = group(source.tensors, model)
    with_extra = pipeline.keeps_mtp
    if with_extra:
        check_extra(grouping, model)
    problems = grouping.problems
    bound = pipeline.bound(config)
    targets = Targets(bound.quantize, bound.rules, dense=model.experts == 0)
    units = []
    left_out = [] if with_extra else [t for u in grouping.extra for t in u.tensors.values()]
    for unit in grouping.ordered(with_extra):
        try:
            planned = plan_unit(bound, unit, model, targets)
        except Unsupported as refusal:
            for problem in refusal.problems:
                problems.add(unit.shorten(problem), unit.name)
            continue
        if any(planned.outputs):
            units.append(planned)
        else:
            left_out.extend(unit.tensors.values())
    for pattern in targets.unused():
        problems.add(f"the rule {pattern!r} matches no weight that can be quantised, or comes behind one that does")
    results = list(_results(units))
    if bound.layout is not None:
        with blame(bound.layout, "the output"):
            problems.extend(bound.layout.check(results))
    edited: Mapping[str, Any] = config
    for stage in bound.stages() if not problems.lines() else ():
        try:
            with blame(stage, "config.json"):
                edited = stage.edit_config(edited, results)
        except Unsupported as refusal:
            problems.extend(refusal.problems)
    files = _plan_files(bound, units, problems) if not problems.lines() else ()
    plan = Plan(
        bound, model, tuple(units), tuple(files), _config_json(pipeline, edited), source.side_files,
        source.files, tuple(left_out), problems.lines(),
    )  # fmt: skip
    folder = pipeline.writer.folder()
    if folder is None:
        return plan
    wrong = check_output(folder, pipeline.loader.folder()) or shortages(folder, files)
    return replace(plan, problems=(*plan.problems, *wrong))


def plan_unit(pipeline: Pipeline, source: UnitSpec, model: ModelConfig, targets: Targets) -> PlannedUnit:
    """What a bound pipeline will make of one unit. Raises Unsupported with every reason why it cannot."""
    steps: list[tuple[UnitSpec, ...]] = []
    units: tuple[UnitSpec, ...] = (source,)
    for stage in pipeline.preprocess:
        units = tuple(made for unit in units for made in _preprocessed(stage, unit))
        steps.append(units)
    results = []
    for unit in units:
        if unit.fused and pipeline.layout is not None:
            raise Unsupported("all experts of the layer are in one tensor: put split-experts first under preprocess")
        if unit.is_expert:
            wrong = list(check_shapes(unit, model))
            if wrong:
                raise Unsupported(*wrong)
        results.append(tuple(_plan_result(pipeline, quantizer, piece) for quantizer, piece in targets.split(unit)))
    return PlannedUnit(source, tuple(steps), tuple(results))


def _preprocessed(stage: Preprocessor, unit: UnitSpec) -> Sequence[UnitSpec]:
    with blame(stage, unit.name):
        return tuple(stage.plan(unit))


def _plan_result(pipeline: Pipeline, quantizer: Quantizer | None, unit: UnitSpec) -> Result:
    layout = pipeline.layout
    if quantizer is not None and layout is not None:
        with blame(layout, unit.name):
            demand = planned(layout, layout.demand(unit), Demand, unit.name)
        with blame(quantizer, unit.name):
            quant = planned(quantizer, quantizer.plan(unit, demand), QuantSpec, unit.name)
        with blame(layout, unit.name):
            packed = planned(layout, layout.plan(quant), PackedSpec, unit.name)
            return Result(unit, quantizer, quant, packed, layout.fused(quantizer, quant))
    renamed = {}
    for role, tensor in unit.tensors.items():
        name: str | None = tensor.name
        if layout is not None:
            with blame(layout, tensor.name):
                name = layout.passthrough(tensor)
        if name is not None:
            renamed[role] = replace(tensor, name=name)
    return Result(unit, renamed=renamed)


def _plan_files(pipeline: Pipeline, units: Sequence[PlannedUnit], problems: Problems) -> Sequence[FileSpec]:
    origin: dict[str, str] = {}
    outputs = []
    formats = {r.packed.format for r in _results(units) if r.packed}
    for unit in units:
        for tensor in unit.outputs:
            if tensor.name in origin:
                problems.add(f"{origin[tensor.name]} and {unit.source.name} would both be called {tensor.name}")
            origin[tensor.name] = unit.source.name
            outputs.append(tensor)
    if problems.lines():
        return ()
    try:
        with blame(pipeline.writer, "the output"):
            return pipeline.writer.plan(outputs, sorted(formats))
    except Unsupported as refusal:
        problems.extend(refusal.problems)
        return ()


def _results(units: Sequence[PlannedUnit]) -> Iterator[Result]:
    return (result for unit in units for results in unit.results for result in results)


def _config_json(pipeline: Pipeline, edited: Mapping[str, Any]) -> bytes | None:
    """The source's own bytes where nothing was changed."""
    folder = pipeline.loader.folder()
    if folder is not None and (folder / CONFIG).is_file() and edited == read_json(folder / CONFIG):
        return (folder / CONFIG).read_bytes()
    return (json.dumps(edited, indent=2) + "\n").encode() if edited else None
