"""Runs all benchmarks, prints the table, and writes results.md and the documentation's charts."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import charts
import conversion
import judging
import kernels
import startup
from rounds import Row

from ktforge import native


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tmp", type=Path, default=Path(tempfile.gettempdir()), help="where the inputs go: 20 GB")
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint that is converted")
    parser.add_argument("--memory-gigabytes", type=float, nargs=2, default=(1, 8), help="sizes for peak memory")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as of an installed package, whose modules are compiled
    with tempfile.TemporaryDirectory(prefix="ktforge-bench-", dir=options.tmp) as name:
        tmp = Path(name)
        rows = kernels.run(2 * options.rounds)
        rows += conversion.two_workers(2 * options.rounds)
        rows += startup.run(tmp, 2 * options.rounds)
        rows += conversion.against_cp(tmp, int(options.gigabytes * 1e9), options.rounds)
        rows += judging.run(tmp, int(options.gigabytes * 1e9), options.rounds)
        rows += conversion.memory(tmp, tuple(int(g * 1e9) for g in options.memory_gigabytes))
    text = _table(rows)
    print(text)
    charts.RESULTS.write_text(text)
    charts.draw()


def _table(rows: list[Row]) -> str:
    mark = {True: "yes", False: "no", None: ""}
    lines = [f"| {row.what} | {row.measured} | {row.goal} | {mark[row.reached]} |" for row in rows]
    peers = ", ".join(f"{name} {_version(name)}" for name in ("libggml-python", "torch", "numpy"))
    return "\n".join([
        "# Results", "",
        f"{_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; instruction set "
        f"{native.current_isa()}; ktforge {version('ktforge')}, Python {platform.python_version()}, {peers}.",
        "What is compared was measured side by side, the best of several rounds; of two workers and one, the median "
        "ratio of rounds with one right after the other. Written by `make bench`.", "",
        "| what | measured | goal | reached |", "| --- | --- | --- | --- |", *lines, "",
    ])  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
