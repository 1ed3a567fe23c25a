"""The whole run, known before the first weight is read: units, output tensors, files, memory, and every refusal."""

from __future__ import annotations

import gc
import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktforge.checkpoint import CONFIG, QUANTIZATION_FILES, CheckpointFolder
from ktforge.dense import check_dense
from ktforge.diskspace import shortages
from ktforge.errors import PlanError, Problems, Unsupported
from ktforge.grouping import group
from ktforge.modelconfig import ModelConfig
from ktforge.mtp import check_extra, without_extra
from ktforge.output import check_output, outlook
from ktforge.quantization import quantization_config
from ktforge.registry import blame
from ktforge.rules import Targets
from ktforge.sizes import counted, size_text
from ktforge.source import Source, read_source
from ktforge.stencils import plan_units
from ktforge.tensors import FileSpec, SourceFile, TensorSpec, total_bytes
from ktforge.unitplan import PlannedUnit, Result, edited_config, later_refusals, results_of

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        """In one line: what it holds has a million."""
        what = f"{counted(len(self.units), 'unit')}, {counted(len(self.files), 'file')}"
        return f"<Plan: {what}, {counted(len(self.problems), 'problem')}>"

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
        return total_bytes(chain.from_iterable([u.source.tensors.values() for u in self.units]))

    @cached_property
    def stored_bytes(self) -> int:
        """``source_bytes`` as the source's files have them: fewer where the loader unpacks what it reads."""
        return min(self.source_bytes, sum(f.nbytes for f in self.sources) or self.source_bytes)

    @cached_property
    def output_bytes(self) -> int:
        return sum(f.nbytes for f in self.files)

    @cached_property
    def expert_units(self) -> int:
        return sum(u.source.experts for u in self.units)

    @property
    def results(self) -> Iterator[Result]:
        """What becomes of every unit, in their order."""
        return results_of(self.units)

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
        """Bytes of all that is in flight at the worst moment; the interpreter and its libraries come on top."""
        largest = heapq.nlargest(workers, self.units, key=attrgetter("working_bytes"))
        return sum([u.working_bytes for u in largest for _ in range(min(workers, u.shares))][:workers])


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
        check_extra(grouping, model, config)
    problems = grouping.problems
    bound = pipeline.bound(config)
    targets = Targets(bound.quantize, bound.rules, dense=model.experts == 0)
    later: dict[tuple[str, ...], tuple[str, ...]] = {}
    left_out = [] if with_extra else [t for u in grouping.extra for t in u.tensors.values()]
    # A fused layer of another number of experts is a problem already; and empty tensors may claim any number.
    wanted = [u for u in grouping.ordered(with_extra) if not u.fused or u.experts == model.experts]
    units: list[PlannedUnit] = []
    outputs: list[TensorSpec] = []
    for unit, planned in zip(wanted, plan_units(bound, wanted, model, targets), strict=True):
        if isinstance(planned, Unsupported):
            told = tuple(map(unit.shorten, planned.problems))
            if told not in later:
                later[told] = tuple(map(unit.shorten, later_refusals(bound, unit, model, targets)))
            for problem in (*told, *later[told]):
                problems.add(problem, unit.name)
        elif made := planned.outputs:
            units.append(planned)
            outputs.extend(made)
        else:
            left_out.extend(unit.tensors.values())
    for pattern in targets.unused():
        problems.add(f"the rule {pattern!r} matches no weight that can be quantised, or comes behind one that does")
    edited = config if with_extra or not grouping.extra else without_extra(config, model)
    results = list(results_of(units))
    edited = edited_config(bound, edited, results, problems)
    files = _plan_files(bound, units, outputs, results, problems) if not problems.lines() else ()
    plan = Plan(
        bound, model, tuple(units), tuple(files), _config_json(pipeline, edited), _side_files(source, edited),
        source.files, tuple(left_out), problems.lines(),
    )  # fmt: skip
    folder = pipeline.writer.folder()
    if folder is None:
        return plan
    wrong = check_output(folder, pipeline.loader.folder()) or shortages(folder, files)
    return replace(plan, problems=(*plan.problems, *wrong))


def _plan_files(
    pipeline: Pipeline,
    units: Sequence[PlannedUnit],
    outputs: Sequence[TensorSpec],
    results: Sequence[Result],
    problems: Problems,
) -> Sequence[FileSpec]:
    """The files for ``outputs``, which with ``results`` are those of ``units``."""
    formats = {r.packed.format for r in results if r.packed}
    if len({t.name for t in outputs}) < len(outputs):
        origin: dict[str, str] = {}
        for unit in units:
            for tensor in unit.outputs:
                if tensor.name in origin:
                    problems.add(f"{origin[tensor.name]} and {unit.source.name} would both be called {tensor.name}")
                origin[tensor.name] = unit.source.name
        return ()
    if not outputs:
        problems.add("the checkpoint has no tensor to write: nothing would be in the output")
        return ()
    try:
        with blame(pipeline.writer, "the output"):
            files = pipeline.writer.plan(outputs, sorted(formats))
            sum(file.nbytes for file in files)  # a header may be counted only now, by the writer's code
            return files
    except Unsupported as refusal:
        problems.extend(refusal.problems)
        return ()


def _side_files(source: Source, edited: Mapping[str, Any]) -> tuple[Path, ...]:
    """Those that go along; what describes another quantisation than the output's does not."""
    if quantization_config(edited) == quantization_config(source.config):
        return source.side_files
    return tuple(p for p in source.side_files if str(p) not in QUANTIZATION_FILES)


def _config_json(pipeline: Pipeline, edited: Mapping[str, Any]) -> bytes | None:
    """The source's own bytes where nothing was changed."""
    folder = pipeline.loader.folder()
    if folder is not None and (folder / CONFIG).is_file() and edited == CheckpointFolder(folder).config():
        return (folder / CONFIG).read_bytes()
    return (json.dumps(edited, indent=2) + "\n").encode() if edited else None
