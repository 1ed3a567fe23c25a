"""What looks at an output, against reading its files, and against the conversion that made it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from inputs import checkpoint
from rounds import Row, best, ratio_row

import ktforge
from ktforge.disk import system


def run(tmp: Path, nbytes: int, rounds: int) -> list[Row]:
    """Wall times with two workers: ``verify`` with a cold and a warm cache, its start-up left out; ``compare`` against
    ``convert``, warm, both from the command line."""
    source, target, other = checkpoint(tmp / "source", nbytes), tmp / "target", tmp / "other"
    _ktforge("convert", "--input-path", source, "--output", target)
    files = sorted(target.glob("*.safetensors"))
    cat, verify = _command(["cat", *map(str, files)]), partial(ktforge.verify, target, workers=2)
    verify()  # imports what it needs

    def cold(command: Callable[[], object]) -> Callable[[], None]:
        def forgetting() -> None:
            _forget(files)
            command()

        return forgetting

    def convert() -> None:
        _ktforge("convert", "--input-path", source, "--output", other, "--workers", "2")
        shutil.rmtree(other)

    seconds = best({"cat": cold(cat), "verify": cold(verify)}, rounds)
    cases = {"warm verify": verify, "convert": convert}
    cases["compare"] = _command([*_KTFORGE, "compare", str(source), str(target), "--workers", "2"])
    seconds |= best(cases, rounds)
    size = sum(file.stat().st_size for file in files) / 1e9
    rows = [
        Row(f"cat of an INT4 output of {size:.2g} GB to /dev/null", f"{seconds['cat']:.2f} s, cold"),
        Row("ktforge.verify of it, cold", f"{seconds['verify'] / seconds['cat']:.2f} × cat"),
        Row("ktforge.verify of it, warm", f"{size / seconds['warm verify']:.2f} GB/s of packed weights"),
        ratio_row("ktforge compare, checkpoint a second", seconds["convert"] / seconds["compare"], 0.5, "convert"),
    ]
    shutil.rmtree(source)
    shutil.rmtree(target)
    return rows


_KTFORGE = (sys.executable, "-m", "ktforge")


def _ktforge(*words: object) -> None:
    _command([*_KTFORGE, *map(str, words)])()


def _command(command: Sequence[str]) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return run


def _forget(files: Sequence[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        system.forget(descriptor)
        os.close(descriptor)
