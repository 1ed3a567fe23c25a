"""The whole run, known before the first weight is read: units, output tensors, files, memory, and every refusal."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktforge.checkpoint.folder import QUANTIZATION_FILES, CheckpointFolder
from ktforge.contract.checks import blame, owner, with_delegates
from ktforge.contract.identity import Identity
from ktforge.contract.plan import ModelConfig, Plan, PlannedUnit, Recipe, Writer, results_of, wrong_pattern
from ktforge.contract.stages import Result, Stage
from ktforge.contract.tensors import FileSpec, TensorSpec
from ktforge.disk.marks import CONFIG
from ktforge.disk.reading import content_hash, open_regular
from ktforge.errors import CheckpointError, PluginError, Problems, Unsupported
from ktforge.model.adapters import is_adapter
from ktforge.model.config import quantization_config
from ktforge.model.mtp import check_extra, without_extra
from ktforge.model.source import Source, read_source
from ktforge.model.units import units_of
from ktforge.output.finished import is_finished
from ktforge.output.folder import check_output
from ktforge.output.publish import collisions
from ktforge.output.space import shortages
from ktforge.planning.kinds import plan_units
from ktforge.planning.targets import Targets
from ktforge.planning.unit import edited_config, later_refusals

logger = logging.getLogger(__name__)


def make_plan(recipe: Recipe, classes: Sequence[type[Stage]] = ()) -> Plan:
    """Plans a run from headers and config.json. Refusals end up in ``problems``.

    ``classes`` are the stages that are installed, whose writers may have left files in the output folder. Raises
    CheckpointError if the checkpoint cannot be read at all.
    """
    with _without_collection():
        plan = _make_plan(recipe)
    logger.info("planned %r", plan)
    if wrong := wrong_pattern(type(recipe.writer)):
        raise PluginError(f"{owner(recipe.writer)} has `weights` with {wrong}")
    writers = [cls for cls in (*classes, type(recipe.writer)) if issubclass(cls, Writer)]
    return replace(plan, stale={writer.name: writer.weights for writer in writers})


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


def _make_plan(recipe: Recipe) -> Plan:
    source = read_source(recipe.loader)
    config, model = source.config, source.model
    check_dense(recipe, model)
    found = units_of(source.tensors, model)
    with_extra = recipe.keeps_mtp
    if with_extra:
        check_extra(found, model, config)
    problems = found.problems
    bound = recipe.bound(source.known)
    targets = Targets(bound.quantize, bound.rules, dense=model.experts == 0)
    later: dict[tuple[str, ...], tuple[str, ...]] = {}
    extra = [] if with_extra else [t for u in found.extra for t in u.tensors.values()]
    left_out = list(extra)
    # A fused layer of another number of experts is a problem already; and empty tensors may claim any number.
    wanted = [u for u in found.ordered(with_extra) if not u.fused or u.experts == model.experts]
    if recipe.layout is not None:  # what reads a quantised output reads no adapters of other weights beside them
        left_out += [t for u in wanted for t in u.tensors.values() if is_adapter(t.name)]
        wanted = [u for u in wanted if not is_adapter(u.name)]
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
    edited = config if with_extra or not found.extra else without_extra(config, model)
    results = list(results_of(units))
    edited = edited_config(bound, edited, results, problems)
    files = _plan_files(bound, units, outputs, results, problems) if not problems.lines() else ()
    inputs, identities = _inputs(bound, problems)
    plan = Plan(
        bound, model, tuple(units), tuple(files), _config_json(recipe, edited), _side_files(source, edited),
        source.files, tuple(left_out), problems.lines(), inputs, {}, source.settled, tuple(extra),
        source.documents, {**source.identities, **identities},
    )  # fmt: skip
    folder = recipe.writer.folder()
    if folder is None:
        return plan
    wrong = check_output(folder, recipe.loader.folder()) or _over_weights(folder, source) or collisions(plan)
    if not wrong and not is_finished(plan):
        wrong = list(shortages(folder, files))
    return replace(plan, problems=(*plan.problems, *wrong))


def _plan_files(
    recipe: Recipe,
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
        with blame(recipe.writer, "the output"):
            files = recipe.writer.plan(outputs, sorted(formats))
            sum(file.nbytes for file in files)  # a header may be counted only now, by the writer's code
            return files
    except Unsupported as refusal:
        problems.extend(refusal.problems)
        return ()


def _inputs(recipe: Recipe, problems: Problems) -> tuple[dict[Path, str], dict[Path, Identity]]:
    """The hash of each file that decides what stages make, and which file it is."""
    found, identities = {}, {}
    for stage in with_delegates(recipe.all_stages()):
        with blame(stage, "its input files"):
            paths = [Path(path) for path in stage.input_files()]
        for path in paths:
            try:
                with open_regular(path) as opened:
                    identities[path] = Identity.of(os.fstat(opened.fileno()))
                    found[path] = content_hash(opened)
            except OSError as error:
                problems.add(f"{path}, which {stage.stage} {stage.name} needs, cannot be read: {error.strerror}")
    return found, identities


def _side_files(source: Source, edited: Mapping[str, Any]) -> tuple[Path, ...]:
    """Those that go along; what describes another quantisation than the output's does not."""
    if quantization_config(edited) == quantization_config(source.config):
        return source.side_files
    return tuple(p for p in source.side_files if str(p) not in QUANTIZATION_FILES)


def _over_weights(folder: Path, source: Source) -> list[str]:
    """A sentence if links of the source's weights lead into the output folder."""
    here = folder.resolve()
    below = (f.path for f in source.files if f.path.resolve().is_relative_to(here))
    return [f"{p} is a link into the output folder {folder}: choose another folder" for p in below][:1]


def _config_json(recipe: Recipe, edited: Mapping[str, Any]) -> bytes | None:
    """The source's own bytes where nothing was changed."""
    folder = recipe.loader.folder()
    if folder is not None and (folder / CONFIG).is_file():
        found = CheckpointFolder(folder, follow_links=True).config()  # the loader has read it, link or not
        one, other = (json.dumps(config, sort_keys=True) for config in (edited, found))
        if one == other:  # as text, since no NaN is equal to another
            with open_regular(folder / CONFIG) as opened:
                return opened.read()
    return (json.dumps(edited, indent=2) + "\n").encode() if edited else None


def check_dense(recipe: Recipe, model: ModelConfig) -> None:
    """Raises CheckpointError if ``model`` is dense and the pipeline is about experts.

    It is if its layout holds nothing else. Without a layout, its preprocessors are all that it does; with one that
    holds dense models, they are what its input goes through, and may find no expert there.
    """
    if model.experts:
        return
    asked = [recipe.layout] if recipe.layout else recipe.preprocess
    stage = next((s for s in asked if s.experts_only), None)
    if stage is None:
        return
    named = f"model_type {model.model_type}" if model.model_type else "no model_type"
    mend = (
        f"the layout {stage.name} holds nothing else; the layout compressed-tensors does"
        if recipe.layout
        else f"{stage.name} converts experts alone; preprocessors of one number format, such as fp8, take any model"
    )
    raise CheckpointError(
        f"this is a dense model ({named}; config.json names no experts): there are no MoE experts to convert, "
        f"and {mend}"
    )
