"""Runs all benchmarks, prints the table, and writes results.md and the chart of docs/performance.md."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import conversion
import kernels
import startup
from rounds import Row

from ktforge import native

HERE = Path(__file__).parent
CHART = HERE.parent / "docs" / "performance.png"


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
        rows, speed = kernels.run(2 * options.rounds)
        rows += conversion.two_workers(2 * options.rounds)
        rows += startup.run(tmp, 2 * options.rounds)
        rows += conversion.against_cp(tmp, int(options.gigabytes * 1e9), options.rounds)
        memory_rows, peaks = conversion.memory(tmp, tuple(int(g * 1e9) for g in options.memory_gigabytes))
        rows += memory_rows
    text = _table(rows)
    print(text)
    (HERE / "results.md").write_text(text)
    _chart(speed, peaks)


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


def _chart(speed: dict[str, float], peaks: dict[float, float]) -> None:
    """Throughput beside the peers', and memory over size. Left out where matplotlib is not installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print(f"no chart: {CHART} needs matplotlib")
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    names = sorted(speed, key=speed.__getitem__)
    colours = ["#2b6cb0" if "kt-amx" in name else "#a0aec0" for name in names]
    left.barh(names, [speed[name] for name in names], color=colours)
    left.bar_label(left.containers[0], fmt="%.2f", padding=3)
    left.set(xlabel="GB of bf16 weights a second, one thread", title="Kernels", xlim=(0, 1.15 * max(speed.values())))
    right.plot(list(peaks), list(peaks.values()), "o-", color="#2b6cb0", label="peak resident memory")
    right.plot([0, max(peaks)], [0, 1000 * max(peaks)], ":", color="#a0aec0", label="the whole checkpoint")
    right.set(
        xlabel="size of the checkpoint (GB)",
        ylabel="MB",
        title="Memory of a conversion",
        ylim=(0, 1000),
        xlim=(0, None),
    )
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, dpi=120)


if __name__ == "__main__":
    main()
