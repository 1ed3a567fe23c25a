"""Runs a plan: units stream through the stages in worker threads, and memory is that of the units in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pluggy

from ktforge import native
from ktforge.contract.checks import blame, delivered, delivered_parts, preprocessed
from ktforge.contract.finite import check_finite
from ktforge.contract.pending import LazyTensors, pending
from ktforge.contract.plan import Plan, PlannedUnit, Recipe, Sink
from ktforge.contract.stages import Fused, Layout, Loader, Result
from ktforge.contract.tensors import PackedSpec, TensorSpec, Unit, UnitSpec
from ktforge.errors import PluginError
from ktforge.native.cores import worker_count
from ktforge.planning.shares import Share, shares
from ktforge.running.watch import SourceWatch, WatchedSink
from ktforge.running.workers import Workers
from ktforge.text import counted

logger = logging.getLogger(__name__)


def execute(
    plan: Plan,
    hook: pluggy.HookRelay,
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
) -> Sequence[PlannedUnit]:
    """Runs ``plan`` with so many ``workers`` (default: one a core); the output does not depend on their number.

    ``overwrite``, ``restart`` and ``verify`` are those of :meth:`~ktforge.Writer.open`. Units whose tensors an
    unfinished output holds are passed over. ``memory_limit`` bounds the bytes in flight
    (:attr:`~ktforge.contract.plan.PlannedUnit.working_bytes`); workers wait where it does not allow more.
    Gives the units that were worked on.

    Raises PlanError for a plan with refusals or a unit above the limit,
    OutputError, CheckpointError for damaged weights, PluginError.
    """
    worker_count(workers)
    plan.check()
    plan.check_memory(memory_limit)
    watch = SourceWatch(plan.identities)
    with _opened(plan, overwrite=overwrite, restart=restart, verify=verify) as sink:
        hook.ktforge_planned(plan=plan)
        kept = [u for u in plan.units if _is_kept(plan, sink, u)]
        if kept:
            hook.ktforge_resumed(specs=[u.source for u in kept])
        names = {u.source.name for u in kept}
        units = [u for u in plan.units if u.source.name not in names]
        pieces = [
            s
            for u in units
            for s in shares(plan.pipeline, u)
            if s.row is not None or not _is_kept(plan, sink, s.planned)
        ]
        logger.info("%s to work on, %s kept", counted(len(units), "unit"), counted(len(kept), "unit"))
        progress = _Progress(pieces)
        crew = Workers(worker_count(workers), memory_limit)

        def work(share: Share) -> None:
            progress.begin(share)
            source = share.planned.source
            try:
                with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
                    _run_unit(plan, share, WatchedSink(sink, watch, source), crew)
            finally:
                release(plan.pipeline.loader, source)
            seconds = progress.end(share)
            if seconds is not None:
                hook.ktforge_unit_written(spec=share.unit.source, seconds=seconds)

        with native.lost_pages_caught():
            crew.run(pieces, work)
        watch.check()
        watch.check_pages()
    return units


@contextmanager
def _opened(plan: Plan, **options: bool) -> Iterator[Sink]:
    """The writer's sink. What goes wrong while it opens or closes is the writer's fault, and what goes wrong between
    is not."""
    writer, within = plan.pipeline.writer, None
    with blame(writer, "the output"):
        manager = writer.open(plan, **options)
        sink = manager.__enter__()
    try:
        yield sink
    except BaseException as error:
        within = error
    try:
        with blame(writer, "the output"):
            manager.__exit__(type(within) if within else None, within, within.__traceback__ if within else None)
    except PluginError as failed:
        if failed.__cause__ is not within or within is None:
            raise
    if within is not None:
        raise within


def _is_kept(plan: Plan, sink: Sink, planned: PlannedUnit) -> bool:
    """Whether an earlier run has put all that comes of a unit in its place."""
    with blame(plan.pipeline.writer, planned.source.name):
        return all(sink.has(t) for t in planned.outputs)


def release(loader: Loader, unit: UnitSpec) -> None:
    """Lets a loader give back what it holds for a unit that was worked on."""
    for tensor in unit.tensors.values():
        with blame(loader, tensor.name):
            loader.release(tensor)


class _Progress:
    """Knows when the last share of a unit is done."""

    def __init__(self, pieces: Iterable[Share]) -> None:
        self._left = Counter(share.unit.source.name for share in pieces)
        self._began: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, share: Share) -> None:
        with self._lock:
            self._began.setdefault(share.unit.source.name, time.perf_counter())

    def end(self, share: Share) -> float | None:
        """The seconds since the first share of the unit began; None if it has more."""
        name = share.unit.source.name
        with self._lock:
            self._left[name] -= 1
            return None if self._left[name] else time.perf_counter() - self._began.pop(name)


def made_of(recipe: Recipe, planned: PlannedUnit) -> Iterator[Unit]:
    """The units that loader and preprocessors make of a share, one at a time."""
    units = iter((_load(recipe.loader, planned.source),))
    for stage, expected in zip(recipe.preprocess, planned.steps, strict=True):
        units = preprocessed(stage, units, expected)
    return units


def _run_unit(plan: Plan, share: Share, sink: Sink, crew: Workers) -> None:
    pipeline, planned = plan.pipeline, share.planned
    units = made_of(pipeline, planned)
    for results in planned.results:  # without zip, which keeps a unit until it has the next one
        unit = next(units)
        for result in results:
            if result.quant is not None:
                _pack(plan, result, _narrowed(unit, result.unit), sink, crew)
                continue
            crew.buffers.clear()
            for role, tensor in (result.renamed or {}).items():
                data = unit.tensors[role]
                made = result.unit.tensors[role]
                if pipeline.preprocess and _is_converted(share.unit.source, role, made):
                    file = made.file or next(iter(planned.source.tensors.values())).file
                    check_finite(made._replace(file=file), data, share.row or 0)
                _write(plan, sink, tensor, data, share.row)
                del data
        del unit
    next(units, None)  # there is none, as the last stage is asked to say


def _is_converted(source: UnitSpec, role: str, made: TensorSpec) -> bool:
    """Whether preprocessors answer for a tensor: all of an expert, and what they made. What they leave as it was may be
    no weight, and have infinity for a value."""
    return source.is_expert or source.fused or source.tensors.get(role) != made


def _narrowed(unit: Unit, spec: UnitSpec) -> Unit:
    """What of a unit one quantizer was asked for; tensors that are not made yet stay so."""
    if spec.tensors.keys() == unit.tensors.keys():
        return unit
    waiting = {role: tensor for role in spec.tensors if (tensor := pending(unit.tensors, role)) is not None}
    return Unit(spec, LazyTensors({r: unit.tensors[r] for r in spec.tensors if r not in waiting}, waiting))


def _load(loader: Loader, spec: UnitSpec) -> Unit:
    tensors = {}
    for role, tensor in spec.tensors.items():
        with blame(loader, tensor.name):
            tensors[role] = loader.read(tensor)
    return delivered(loader, Unit(spec, tensors), spec)


def _pack(plan: Plan, result: Result, unit: Unit, sink: Sink, crew: Workers) -> None:
    quantizer, layout = result.quantizer, plan.pipeline.layout
    assert quantizer is not None and layout is not None and result.quant is not None and result.packed is not None
    pieces = _pieces(layout, result, finely=crew.scarce) if result.fused else []
    if not pieces:
        buffers = crew.buffers.of(result.packed)
        with blame(quantizer, result.unit.name):
            quantised = quantizer.quantize(unit, result.quant)
        delivered_parts(quantizer, quantised, result.quant, layout)
        with blame(layout, result.unit.name):
            layout.pack(quantised, buffers)
        for tensor in result.packed.tensors:
            _write(plan, sink, tensor, buffers[tensor.name])
        return

    def one(fused: Fused, packed: PackedSpec) -> None:
        buffers = crew.buffers.of(packed)
        with blame(layout, result.unit.name):
            fused(unit, buffers)
        for tensor in packed.tensors:
            _write(plan, sink, tensor, buffers[tensor.name])

    if len(pieces) == 1:
        one(*pieces[0])
    else:
        crew.together([partial(one, *piece) for piece in pieces])


def _pieces(layout: Layout, result: Result, *, finely: bool) -> list[tuple[Fused, PackedSpec]]:
    """What fills a unit, or if ``finely`` and it can be done each of its parts, in one step; empty if nothing does."""
    assert result.quantizer is not None and result.quant is not None and result.packed is not None
    found = []
    for part in result.quant.parts if finely else (None,):
        quant = result.quant if part is None else result.quant._replace(parts=(part,))
        with blame(layout, result.unit.name):
            fused = layout.fused(result.quantizer, quant)
            if fused is None:
                return _pieces(layout, result, finely=False) if finely else []
            found.append((fused, result.packed if part is None else layout.plan(quant)))
    return found


def _write(plan: Plan, sink: Sink, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
    """An OSError is the disk's, and passes; anything else that a sink raises is its writer's."""
    failed = None
    with blame(plan.pipeline.writer, tensor.name):
        try:
            sink.write(tensor, data, row)
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
