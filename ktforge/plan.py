"""The whole run, known before the first weight is read: units, output tensors, files, memory, and every refusal."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktforge.errors import CheckpointError, PlanError, Problems, Unsupported
from ktforge.grouping import check_shapes, group
from ktforge.modelconfig import ModelConfig, read_model_config
from ktforge.registry import blame
from ktforge.stages import Fused, Preprocessor
from ktforge.tensors import FileSpec, PackedSpec, QuantSpec, SourceFile, TensorSpec, UnitSpec

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Result:
    """What becomes of one unit behind the preprocessors: it is packed, or its tensors are renamed.

    ``fused`` quantises and packs in one step; None where that takes two.

    ``renamed`` maps roles to output tensors; a role that is missing there is left out.
    """

    unit: UnitSpec
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
    """A unit as the loader finds it, the units that each preprocessor makes of it, and their results."""

    source: UnitSpec
    steps: tuple[tuple[UnitSpec, ...], ...]
    results: tuple[Result, ...]

    @property
    def working_bytes(self) -> int:
        """Bytes of all arrays that may live while this unit is worked on, mapped source pages included."""
        total = self.source.nbytes
        before: Sequence[UnitSpec] = (self.source,)
        for step in self.steps:
            total += sum(u.nbytes for u in step if u not in before)
            before = step
        for result in self.results:
            total += sum(t.nbytes for t in result.outputs) if result.packed else 0
            if result.quant and not result.fused:
                total += sum(p.shape[0] * p.shape[1] for p in result.quant.parts)
        return total


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
            raise PlanError(
                f"{largest.source.name} needs {largest.working_bytes / 1e6:,.0f} MB, more than the memory limit of "
                f"{limit / 1e6:,.0f} MB: allow at least that"
            )

    @cached_property
    def source_bytes(self) -> int:
        return sum(u.source.nbytes for u in self.units)

    @cached_property
    def output_bytes(self) -> int:
        return sum(f.nbytes for f in self.files)

    @cached_property
    def expert_units(self) -> int:
        return sum(u.source.is_expert for u in self.units)

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The layouts' formats in the output, such as kt-amx-int4/1."""
        return tuple(sorted({r.packed.format for u in self.units for r in u.results if r.packed}))

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The quantizers' methods, such as absmax-int4/1."""
        return tuple(sorted({r.quant.method for u in self.units for r in u.results if r.quant}))

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
    loader = pipeline.loader
    with blame(loader, "its checkpoint"):
        config = loader.config()
        specs = list(loader.scan())
        side_files, sources = tuple(loader.side_files()), tuple(loader.sources())
    model = read_model_config(config)
    grouping = group(specs, model)
    # A layout holds the model's own layers; a checkpoint that is only converted keeps all it has.
    with_extra = pipeline.layout is None
    problems = grouping.problems
    bound = pipeline.bound(config)
    units = []
    left_out = [] if with_extra else [t for u in grouping.extra for t in u.tensors.values()]
    for unit in grouping.ordered(with_extra):
        try:
            planned = _plan_unit(bound, unit, model)
        except Unsupported as refusal:
            for problem in refusal.problems:
                problems.add(problem, unit.name)
            continue
        if any(r.outputs for r in planned.results):
            units.append(planned)
        else:
            left_out.extend(unit.tensors.values())
    files = _plan_files(bound, units, problems) if not problems.lines() else ()
    edited: Mapping[str, Any] = config
    for stage in bound.stages():
        with blame(stage, "config.json"):
            edited = stage.edit_config(edited)
    plan = Plan(
        bound, model, tuple(units), tuple(files), _config_json(pipeline, config, edited), side_files, sources,
        tuple(left_out), problems.lines(),
    )  # fmt: skip
    shortage = _disk_shortage(plan)
    return replace(plan, problems=(*plan.problems, shortage)) if shortage else plan


def _plan_unit(pipeline: Pipeline, source: UnitSpec, model: ModelConfig) -> PlannedUnit:
    steps: list[tuple[UnitSpec, ...]] = []
    units: tuple[UnitSpec, ...] = (source,)
    for stage in pipeline.preprocess:
        units = tuple(made for unit in units for made in _preprocessed(stage, unit))
        steps.append(units)
    results = []
    for unit in units:
        if unit.is_expert:
            wrong = list(check_shapes(unit, model))
            if wrong:
                raise Unsupported(*wrong)
        results.append(_plan_result(pipeline, unit))
    return PlannedUnit(source, tuple(steps), tuple(results))


def _preprocessed(stage: Preprocessor, unit: UnitSpec) -> Sequence[UnitSpec]:
    with blame(stage, unit.name):
        return stage.plan(unit)


def _plan_result(pipeline: Pipeline, unit: UnitSpec) -> Result:
    quantizer, layout = pipeline.quantize, pipeline.layout
    if quantizer is not None and layout is not None and unit.is_expert:
        with blame(layout, unit.name):
            demand = layout.demand(unit)
        with blame(quantizer, unit.name):
            quant = quantizer.plan(unit, demand)
        with blame(layout, unit.name):
            return Result(unit, quant, layout.plan(quant), layout.fused(quantizer, quant))
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
    formats: set[str] = set()
    for unit, result in _results(units):
        if result.packed:
            formats.add(result.packed.format)
        for tensor in result.outputs:
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


def _results(units: Sequence[PlannedUnit]) -> Iterator[tuple[PlannedUnit, Result]]:
    for unit in units:
        for result in unit.results:
            yield unit, result


def _config_json(pipeline: Pipeline, config: Mapping[str, Any], edited: Mapping[str, Any]) -> bytes | None:
    """The source's own bytes where no stage changed anything."""
    folder = pipeline.loader.folder()
    if edited == config and folder is not None:
        try:
            return (folder / "config.json").read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from error
    return (json.dumps(edited, indent=2) + "\n").encode() if edited else None


def _disk_shortage(plan: Plan) -> str | None:
    folder = plan.pipeline.writer.folder()
    if folder is None:
        return None
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free >= plan.output_bytes:
        return None
    return (
        f"the output needs {plan.output_bytes / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free at {existing}: "
        "make room or write elsewhere"
    )
