"""Runs a plan: units stream through the stages in worker threads, and memory is that of the units in flight."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np
import pluggy

from ktforge import native
from ktforge.errors import PluginError
from ktforge.lazy import LazyTensors, Pending, pending
from ktforge.plan import Plan
from ktforge.registry import blame, owner
from ktforge.sourcewatch import SourceWatch, WatchedSink
from ktforge.stages import Loader, Preprocessor, Quantizer, Sink, Stage
from ktforge.tensors import QuantSpec, QuantUnit, Unit, UnitSpec, dtype_name
from ktforge.unitplan import PlannedUnit, Result


def default_workers() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def execute(
    plan: Plan,
    hook: pluggy.HookRelay,
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
) -> None:
    """Runs ``plan`` with so many ``workers`` (default: one a core); the output does not depend on their number.

    ``overwrite``, ``restart`` and ``verify`` are those of :meth:`~ktforge.Writer.open`. Units whose tensors an
    unfinished output holds are passed over. ``memory_limit`` bounds the bytes of the units in flight
    (:attr:`~ktforge.plan.PlannedUnit.working_bytes`); workers wait where it does not allow another one.

    Raises PlanError for a plan with refusals or a unit above the limit,
    OutputError, CheckpointError for damaged weights, PluginError.
    """
    plan.check()
    plan.check_memory(memory_limit)
    watch = SourceWatch(plan.sources)
    loader = plan.pipeline.loader
    with plan.pipeline.writer.open(plan, overwrite=overwrite, restart=restart, verify=verify) as sink:
        hook.ktforge_planned(plan=plan)

        def work(planned: PlannedUnit) -> None:
            started = time.perf_counter()
            try:
                _run_unit(plan, planned, WatchedSink(sink, watch, planned.source))
            finally:
                for tensor in planned.source.tensors.values():
                    with blame(loader, tensor.name):
                        loader.release(tensor)
            hook.ktforge_unit_written(spec=planned.source, seconds=time.perf_counter() - started)

        kept = [u for u in plan.units if all(sink.has(t) for t in u.outputs)]
        if kept:
            hook.ktforge_resumed(specs=[u.source for u in kept])
        names = {u.source.name for u in kept}
        units = [u for u in plan.units if u.source.name not in names]
        with native.lost_pages_caught():
            _for_each(units, work, workers or default_workers(), memory_limit)
        watch.check()


def _for_each(
    units: Sequence[PlannedUnit],
    work: Callable[[PlannedUnit], None],
    workers: int,
    memory_limit: int | None,
) -> None:
    """Calls ``work`` on all units from ``workers`` threads; the first exception stops the others at their next unit.

    Units are taken in their order, which is nearly that of the files.
    """
    remaining = iter(units)
    in_flight = 0
    changed = threading.Condition()
    stop = threading.Event()

    def take() -> PlannedUnit | None:
        nonlocal in_flight
        with changed:
            unit = next(remaining, None)
            if unit is None:
                return None
            size = unit.working_bytes
            changed.wait_for(lambda: memory_limit is None or in_flight + size <= memory_limit or stop.is_set())
            in_flight += size
            return None if stop.is_set() else unit

    def loop() -> None:
        nonlocal in_flight
        try:
            while not stop.is_set() and (unit := take()) is not None:
                try:
                    work(unit)
                finally:
                    with changed:
                        in_flight -= unit.working_bytes
                        changed.notify_all()
        except BaseException:
            halt()
            raise

    def halt() -> None:
        with changed:
            stop.set()
            changed.notify_all()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="ktforge")
    try:
        futures = [pool.submit(loop) for _ in range(workers)]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        halt()
        _join(pool)


def _join(pool: ThreadPoolExecutor) -> None:
    """Waits for the units in flight, however often it is interrupted: no thread may outlive the sink it writes to."""
    interrupt = None
    while True:
        try:
            pool.shutdown()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _run_unit(plan: Plan, planned: PlannedUnit, sink: Sink) -> None:
    pipeline = plan.pipeline
    units = iter((_load(pipeline.loader, planned.source),))
    for stage, expected in zip(pipeline.preprocess, planned.steps, strict=True):
        units = _preprocess(stage, units, expected)
    for results, unit in zip(planned.results, units, strict=True):
        for result in results:
            if result.quant is None:
                for role, tensor in (result.renamed or {}).items():
                    sink.write(tensor, unit.tensors[role])
            else:
                _pack(plan, result, _narrowed(unit, result.unit), sink)


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
    return _checked(loader, Unit(spec, tensors), spec)


def _preprocess(stage: Preprocessor, units: Iterator[Unit], expected: Sequence[UnitSpec]) -> Iterator[Unit]:
    specs = iter(expected)
    for unit in units:
        made = iter(stage.apply(unit))
        while True:
            with blame(stage, unit.spec.name):
                result = next(made, None)
            if result is None:
                break
            spec = next(specs, None)
            if spec is None:
                raise PluginError(f"{owner(stage)} made more units of {unit.spec.name} than it planned")
            yield _checked(stage, result, spec)
    if next(specs, None) is not None:
        raise PluginError(f"{owner(stage)} made fewer units than it planned for {expected[0].name}")


def _pack(plan: Plan, result: Result, unit: Unit, sink: Sink) -> None:
    quantizer, layout = result.quantizer, plan.pipeline.layout
    assert quantizer is not None and layout is not None and result.quant is not None and result.packed is not None
    buffers = {t.name: np.empty(t.shape, t.dtype) for t in result.packed.tensors}
    if result.fused is not None:
        with blame(layout, result.unit.name):
            result.fused(unit, buffers)
    else:
        with blame(quantizer, result.unit.name):
            quantised = quantizer.quantize(unit, result.quant)
        _check_quantised(quantizer, quantised, result.quant)
        with blame(layout, result.unit.name):
            layout.pack(quantised, buffers)
    for tensor in result.packed.tensors:
        sink.write(tensor, buffers[tensor.name])


def _checked(stage: Stage, unit: Unit, spec: UnitSpec) -> Unit:
    if unit.tensors.keys() != spec.tensors.keys():
        got, planned = sorted(unit.tensors), sorted(spec.tensors)
        raise PluginError(f"{owner(stage)} delivered {got} of {spec.name}; {planned} were planned")
    for role, tensor in spec.tensors.items():
        waiting = pending(unit.tensors, role)
        array = unit.tensors[role] if waiting is None else waiting
        _check_array(stage, tensor.name, array, tensor.dtype, tensor.shape)
    return Unit(spec, unit.tensors)


def _check_quantised(stage: Quantizer, unit: QuantUnit, spec: QuantSpec) -> None:
    if len(unit.parts) != len(spec.parts):
        raise PluginError(
            f"{owner(stage)} delivered {len(unit.parts)} parts of {spec.unit.name}; {len(spec.parts)} were planned"
        )
    for part, got in zip(spec.parts, unit.parts, strict=True):
        name = f"{spec.unit.name} {part.projection} {part.index}"
        groups = (part.shape[0], spec.groups(part))
        _check_array(stage, f"the codes of {name}", got.codes, np.dtype(np.int8), part.shape)
        _check_array(stage, f"the scales of {name}", got.scales, spec.scale_dtype, groups)
        if spec.symmetric != (got.zeros is None):
            raise PluginError(f"{owner(stage)}: zero points of {name} do not fit symmetric={spec.symmetric}")
        if got.zeros is not None:
            _check_array(stage, f"the zero points of {name}", got.zeros, np.dtype(np.int8), groups)


def _check_array(stage: Stage, name: str, array: np.ndarray | Pending, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    is_array = isinstance(array, np.ndarray | Pending)
    if not is_array or array.dtype != dtype or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__
        raise PluginError(f"{owner(stage)} delivered {name} as {got}; {dtype_name(dtype)} {list(shape)} was planned")
