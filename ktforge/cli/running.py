"""What run, convert and moe-to-bf16 have in common: carry a pipeline out and show how far it is."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from ktforge.hookspecs import hookimpl

if TYPE_CHECKING:
    from ktforge.pipeline import Pipeline
    from ktforge.plan import Plan
    from ktforge.registry import Registry
    from ktforge.tensors import UnitSpec

#: Seconds between two lines where there is no terminal to draw a bar on.
LINE_EVERY = 10.0


def carry_out(
    pipeline: Pipeline, registry: Registry, *, overwrite: bool, workers: int | None, memory_limit: str | None
) -> None:
    """Runs the pipeline with a progress bar on a terminal, and plain lines elsewhere."""
    limit = None if memory_limit is None else _parsed(memory_limit)
    progress = Bar() if sys.stderr.isatty() else Lines()
    registry.add(progress, name="ktforge-progress")
    started = time.perf_counter()
    try:
        plan = pipeline.run(overwrite=overwrite, workers=workers, memory_limit=limit, registry=registry)
    finally:
        progress.stop()
    seconds = time.perf_counter() - started
    print(
        f"{pipeline.writer.folder()}: {plan.expert_units:,} experts, {gigabytes(plan.source_bytes)} → "
        f"{gigabytes(plan.output_bytes)} in {seconds:,.1f} s ({gigabytes(int(plan.source_bytes / seconds))}/s)"
    )


def _parsed(memory_limit: str) -> int:
    from ktforge.errors import ConfigError
    from ktforge.sizes import parse_size

    try:
        return parse_size(memory_limit)
    except ValueError as error:
        raise ConfigError(f"--memory-limit: {error}") from error


def gigabytes(count: int) -> str:
    """A number of bytes with the unit that suits it."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


class Bar:
    """A rich progress bar with bytes a second and the time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        self._progress = Progress(
            "converting", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip

    @hookimpl
    def ktforge_planned(self, plan: Plan) -> None:
        self._task = self._progress.add_task("", total=plan.source_bytes)
        self._progress.start()

    @hookimpl
    def ktforge_unit_written(self, spec: UnitSpec) -> None:
        self._progress.advance(self._task, spec.nbytes)

    def stop(self) -> None:
        self._progress.stop()


class Lines:
    """A line now and then on stderr, for logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._started = self._last = time.monotonic()

    @hookimpl
    def ktforge_planned(self, plan: Plan) -> None:
        self._total = plan.source_bytes
        self._started = self._last = time.monotonic()
        print(f"converting {gigabytes(self._total)}", file=sys.stderr)

    @hookimpl
    def ktforge_unit_written(self, spec: UnitSpec) -> None:
        with self._lock:
            self._done += spec.nbytes
            now = time.monotonic()
            if now - self._last < LINE_EVERY:
                return
            self._last = now
            rate = self._done / (now - self._started)
            left = (self._total - self._done) / rate
            share = f"{self._done / self._total:4.0%}  {gigabytes(self._done)}"
            print(f"{share}  {gigabytes(int(rate))}/s  {left:,.0f} s left", file=sys.stderr)

    def stop(self) -> None:
        """Nothing is held open."""
