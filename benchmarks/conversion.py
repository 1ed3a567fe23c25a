"""Whole conversions against ``cp -r`` of the checkpoint, their memory, and where their time goes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import xxhash
from inputs import checkpoint, fp8_checkpoint
from ktforge_plugins import Int4, Int8, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from rounds import Row, best, median_ratios, ratio_row

from ktforge import FileSpec, Pipeline, Plan, TensorSpec, Writer, native
from ktforge.disk import system

#: A file system in memory.
MEMORY = Path("/dev/shm")
#: MB. An expert of 2048 x 7168 is 88 MB of bf16, and two of them are in flight.
RSS_GOAL = 400
#: The peak of a process counts that of the one it was forked from, so a small one stands between.
LAUNCHER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def against_cp(tmp: Path, nbytes: int, rounds: int) -> list[Row]:
    """Wall times with a warm cache and two workers, start-up and fsync included (cp does not sync)."""
    source, target = checkpoint(tmp / "source", nbytes), tmp / "target"

    def fresh(command: list[str]) -> Callable[[], None]:
        def run() -> None:
            subprocess.run(command, check=True, capture_output=True)
            shutil.rmtree(target)

        return run

    cases = {"cp -r": fresh(["cp", "-r", str(source), str(target)])}
    for method in ("int4", "int8"):
        cases[method] = fresh([*_convert(source, target, method), "--workers", "2"])
    for path in source.iterdir():  # warms the cache
        path.read_bytes()
    seconds = best(cases, rounds)
    rows = [Row(f"cp -r of {nbytes / 1e9:g} GB", f"{seconds['cp -r']:.2f} s")]
    for method, goal in {"int4": 1.0, "int8": 1.3}.items():
        rows.append(ratio_row(f"ktforge convert to {method}", seconds[method] / seconds["cp -r"], goal, "cp -r", True))
    rows += _profile(source, target)
    shutil.rmtree(source)
    return rows


class Nowhere(Writer):
    """Drops what is written: what is left of a run is reading, computing and the work around it."""

    name: ClassVar[str] = "nowhere"

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        return [FileSpec("nowhere", b"", tuple(tensors))]

    @contextmanager
    def open(self, plan: Plan, **options: bool) -> Iterator[Nowhere]:
        yield self

    def has(self, tensor: TensorSpec) -> bool:
        return False

    def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
        pass


def two_workers(rounds: int) -> list[Row]:
    """Two workers against one on FP8 → INT4, the conversion with the most arithmetic a byte, from memory; then with the
    output in memory too, which takes the system as long again for its pages."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="ktforge-bench-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        source, target = fp8_checkpoint(Path(name) / "source", 64), Path(name) / "target"

        def run(workers: int, writer: Writer) -> None:
            Pipeline(
                loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(),
                writer=writer,
            ).run(workers=workers)  # fmt: skip
            shutil.rmtree(target, ignore_errors=True)

        for what, writer, goal in (
            ("computing alone", Nowhere(), 1.8),
            ("written to memory", SafetensorsWriter(path=target, max_shard_size="100MB"), None),
        ):
            one, two = (partial(run, workers, writer) for workers in (1, 2))
            ratio, cpu = median_ratios(one, two, 2 * rounds, time.perf_counter, time.process_time)
            label = f"two workers, fp8 → kt-amx int4, {what}"
            rows.append(
                ratio_row(label, ratio, goal, "one worker") if goal else Row(label, f"{ratio:.2f} × one worker")
            )
            rows.append(Row(f"CPU time of the two, {what}", f"{1 / cpu:.2f} × one worker"))
    return rows


def memory(tmp: Path, sizes: tuple[int, int]) -> list[Row]:
    """Peak resident memory in MB by the checkpoint's size in GB; mapped pages of files count."""
    peaks = {}
    for size in sizes:
        source, target = checkpoint(tmp / "source", size), tmp / "target"
        launch = [sys.executable, "-c", LAUNCHER, *_convert(source, target, "int4"), "--workers", "2"]
        done = subprocess.run(launch, check=True, capture_output=True, text=True)
        peaks[size / 1e9] = int(done.stdout) / (1e6 if sys.platform == "darwin" else 1024)
        shutil.rmtree(source)
        shutil.rmtree(target)
    small, large = peaks.values()
    rows = [
        Row(f"peak memory, {size:g} GB checkpoint", f"{peak:.0f} MB", f"≤ {RSS_GOAL} MB", peak <= RSS_GOAL)
        for size, peak in peaks.items()
    ]
    rows.append(ratio_row("peak memory, large checkpoint", large / small, 1.1, "the small one's", at_most=True))
    return rows


def _convert(source: Path, target: Path, method: str) -> list[str]:
    command = [sys.executable, "-m", "ktforge", "convert", "--input-path", str(source), "--output", str(target)]
    return [*command, "--quant-method", method]


def _profile(source: Path, target: Path) -> list[Row]:
    """CPU time of one worker by what it is spent on, in one run of each method."""
    rows = []
    for quantizer in (Int4(), Int8()):
        pipeline = Pipeline(
            loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=quantizer, layout=KtAmx(),
            writer=SafetensorsWriter(path=target),
        )  # fmt: skip
        spent = {"read": 0.0, "kernel": 0.0, "hash": 0.0, "write": 0.0}
        watched = [
            (SafetensorsLoader, "read", "read"), (SafetensorsLoader, "release", "read"),
            (native, "absmax_kt_amx", "kernel"), (os, "pwrite", "write"),
            (os, "fsync", "write"), (system, "_sync_file_range", "write"), (system, "_fallocate", "write"),
        ]  # fmt: skip
        kept = [(where, name, getattr(where, name)) for where, name, _ in watched]
        kept.append((xxhash, "xxh3_128", xxhash.xxh3_128))
        for where, name, part in watched:
            setattr(where, name, _timed(getattr(where, name), spent, part))
        xxhash.xxh3_128 = _timed_hashes(xxhash.xxh3_128, spent)
        started, cpu = time.perf_counter(), time.process_time()
        try:
            pipeline.run(workers=1)
        finally:
            for where, name, function in kept:
                setattr(where, name, function)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        shutil.rmtree(target)
        shares = ", ".join(f"{part} {seconds / cpu:.0%}" for part, seconds in spent.items())
        rest = f"Python and the rest {1 - sum(spent.values()) / cpu:.0%}"
        rows.append(Row(f"CPU time to {quantizer.name}, one worker", f"{shares}, {rest}; {cpu:.2f} s of {wall:.2f} s"))
    return rows


def _timed_hashes(make: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def made(*arguments: Any) -> SimpleNamespace:
        found = make(*arguments)
        return SimpleNamespace(update=_timed(found.update, spent, "hash"), hexdigest=found.hexdigest)

    return made


def _timed(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    lock = threading.Lock()

    def timed(*arguments: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*arguments)
        finally:
            with lock:
                spent[part] += time.thread_time() - started

    return timed
