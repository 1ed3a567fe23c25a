"""What run, convert, moe-to-bf16 and dequantize have in common: carry a pipeline out and show how far it is."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ktforge.cli.options import RunOptions, is_quiet
from ktforge.cli.plans import show
from ktforge.cli.table import show_json
from ktforge.contract.hooks import hookimpl
from ktforge.errors import AlreadyDone, ConfigError, OutputError
from ktforge.text import counted, parse_size, printable, size_text

if TYPE_CHECKING:
    from ktforge.contract.plan import Plan, Summary
    from ktforge.contract.registry import Registry
    from ktforge.contract.tensors import UnitSpec
    from ktforge.pipeline.pipeline import Pipeline

#: Seconds between two lines where there is no terminal to draw a bar on.
LINE_EVERY = 10.0


def carry_out(pipeline: Pipeline, registry: Registry, options: RunOptions) -> None:
    """Runs the pipeline with a progress bar on a terminal, and plain lines elsewhere.

    Ctrl-C ends it when the units in flight are written; a second one ends the process at once. Either way, and after
    an error, the output can go on.
    """
    limit = memory_bytes(options.memory_limit)
    if options.dry_run:
        show(pipeline.plan(registry), as_json=options.as_json, workers=options.workers, memory_limit=limit)
        return
    progress = Bar() if sys.stderr.isatty() else Lines()
    if not is_quiet():
        registry.add(progress, name="ktforge-progress")
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        summary = pipeline.run(
            overwrite=options.overwrite, restart=options.restart, verify=options.verify,
            verify_output=options.verify_output, workers=options.workers, memory_limit=limit, registry=registry,
        )  # fmt: skip
    except AlreadyDone as done:
        _say_already_done(done, pipeline, as_json=options.as_json)
        return
    except KeyboardInterrupt:
        before = interrupts  # a second Ctrl-C may come until the process has ended
        progress.stop()
        _say_how_to_go_on(pipeline)
        raise
    except OutputError as error:
        progress.stop()
        if isinstance(error.__cause__, OSError):  # once there is room again, say; a refusal has its own mend
            _say_how_to_go_on(pipeline)
        raise
    finally:
        progress.stop()
        signal.signal(signal.SIGINT, before)
    _say_done(summary, as_json=options.as_json)


def _say_done(summary: Summary, *, as_json: bool) -> None:
    """What was done, and how it is served: a sentence each, or as JSON."""
    plan, seconds = summary.plan, summary.seconds
    if as_json:
        show_json(
            {
                "folder": str(summary.folder) if summary.folder else None,
                "already_done": False,
                "expert_units": plan.expert_units,
                "units": len(plan.units),
                "units_worked_on": summary.units,
                "source_bytes": plan.stored_bytes,
                "output_bytes": plan.output_bytes,
                "formats": list(plan.formats),
                "seconds": round(seconds, 3),
                "serve": plan.serving,
            }
        )
    elif not is_quiet():
        read = summary.source_bytes * plan.stored_bytes / max(1, plan.source_bytes)
        what = counted(plan.expert_units, "expert") if plan.expert_units else counted(len(plan.units), "tensor")
        print(
            f"{printable(str(summary.folder))}: {what}, {size_text(plan.stored_bytes)} → "
            f"{size_text(plan.output_bytes)} in {seconds:,.1f} s ({size_text(int(read / seconds))}/s)"
        )
        if plan.serving:
            print(f"serve it with: {printable(plan.serving)}")


def _say_already_done(done: AlreadyDone, pipeline: Pipeline, *, as_json: bool) -> None:
    if as_json:
        show_json({"folder": str(pipeline.writer.folder()), "already_done": True})
    elif not is_quiet():
        print(printable(str(done)))


def memory_bytes(memory_limit: str | None) -> int | None:
    """``--memory-limit`` in bytes. Raises ConfigError for what is no size."""
    return None if memory_limit is None else size_of("--memory-limit", memory_limit)


def size_of(option: str, text: str) -> int:
    """The bytes that an option says. Raises ConfigError for what is no size."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


class _Interrupts:
    """Handles Ctrl-C: the first one is an exception in the main thread, which waits for the units in flight. The second
    one waits for nothing.

    Python's own output is locked, and the key may be pressed while the main thread is writing; so both write past it.
    """

    def __init__(self) -> None:
        self._seen = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""  # the bar hides it
            os.write(2, cursor + b"\nstopped: the same command goes on behind what this one has saved\n")
            os._exit(130)  # what is not in the journal yet is written again
        self._seen = True
        os.write(2, b"\nstopping when the units in flight are written; Ctrl-C again to stop at once\n")
        raise KeyboardInterrupt


def _say_how_to_go_on(pipeline: Pipeline) -> None:
    from ktforge.output.folder import is_unfinished

    folder = pipeline.writer.folder()
    if folder is not None and is_unfinished(folder):
        print(printable(f"{folder} is unfinished: the same command goes on where it stopped"), file=sys.stderr)


class Bar:
    """A rich progress bar with bytes a second and the time left; ``done`` counts the bytes of this run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        self._progress = Progress(
            "converting", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
            console=Console(stderr=True),
        )  # fmt: skip
        self._lock = threading.Lock()
        self.done = 0

    @hookimpl
    def ktforge_planned(self, plan: Plan) -> None:
        self._task = self._progress.add_task("", total=plan.source_bytes)
        self._progress.start()

    @hookimpl
    def ktforge_resumed(self, specs: Sequence[UnitSpec]) -> None:
        self._progress.reset(self._task, completed=sum(s.nbytes for s in specs))

    @hookimpl
    def ktforge_unit_written(self, spec: UnitSpec) -> None:
        with self._lock:
            self.done += spec.nbytes
        self._progress.advance(self._task, spec.nbytes)

    def stop(self) -> None:
        self._progress.stop()


class Lines:
    """A line now and then on stderr, for logs; ``done`` counts the bytes of this run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = self._total = 0
        self.done = 0
        self._started = self._last = time.monotonic()

    @hookimpl
    def ktforge_planned(self, plan: Plan) -> None:
        self._total = plan.source_bytes
        self._started = self._last = time.monotonic()
        print(f"converting {size_text(self._total)}", file=sys.stderr)

    @hookimpl
    def ktforge_resumed(self, specs: Sequence[UnitSpec]) -> None:
        self._kept = sum(s.nbytes for s in specs)
        print(f"going on: {size_text(self._kept)} are converted already", file=sys.stderr)

    @hookimpl
    def ktforge_unit_written(self, spec: UnitSpec) -> None:
        with self._lock:
            self.done += spec.nbytes
            now = time.monotonic()
            if now - self._last < LINE_EVERY:
                return
            self._last = now
            rate = self.done / (now - self._started)
            there = self._kept + self.done
            left = (self._total - there) / rate
            share = f"{there / self._total:4.0%}  {size_text(there)}"
            print(f"{share}  {size_text(int(rate))}/s  {left:,.0f} s left", file=sys.stderr)

    def stop(self) -> None:
        """Nothing is held open."""
