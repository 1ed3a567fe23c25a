"""The lines that a run prints where there is no terminal, and what of a command's options reaches it."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ktforge import UnitSpec
from ktforge.cli import app, progress
from ktforge.pipeline.pipeline import Pipeline
from ktforge.testing.units import weight_unit


def unit(nbytes):
    import numpy as np

    return weight_unit({"weight": np.zeros(nbytes, np.uint8)}, "x", None).spec


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("kept", "line"),
    [(0, " 30%  300 bytes  15 bytes/s  47 s left\n"), (400, " 70%  700 bytes  15 bytes/s  20 s left\n")],
)
def test_a_line_counts_what_was_there_but_not_for_the_speed(clock, capsys, kept, line):
    lines = progress.Lines()
    lines.ktforge_planned(SimpleNamespace(source_bytes=1000))
    if kept:
        lines.ktforge_resumed([unit(kept - 1), unit(1)])
    clock[0] += 9.9
    lines.ktforge_unit_written(unit(100))
    said = "converting 1.00 kB\n" + (f"going on: {kept} bytes are converted already\n" if kept else "")
    assert capsys.readouterr().err == said, "not yet"
    clock[0] += 10.1
    lines.ktforge_unit_written(unit(200))
    assert capsys.readouterr().err == line
    clock[0] += 9
    lines.ktforge_unit_written(unit(1))
    assert capsys.readouterr().err == "" and lines.done == 301


#: What is given, and what the run is told.
OPTIONS = [
    ([], {}),
    (["--overwrite"], {"overwrite": True}),
    (["--restart"], {"restart": True}),
    (["--verify"], {"verify": True}),
    (["--workers", "3"], {"workers": 3}),
    (["--verify-output"], {"verify_output": True}),
    (["--memory-limit", "2GB"], {"memory_limit": 2_000_000_000}),
    (["--memory-limit", "1GiB"], {"memory_limit": 1 << 30}),
]


@pytest.mark.parametrize(("given", "told"), OPTIONS)
@pytest.mark.parametrize("command", ["convert", "moe-to-bf16", "run"])
def test_options_of_a_run_reach_it(source, tmp_path, monkeypatch, command, given, told):
    seen = []

    def run(self, **options):
        del options["registry"]
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipeline, "run", run)
    words = ["--input-path", str(source), "--output", str(tmp_path / "out")]
    if command == "convert":
        words += ["--quant-method", "int4"]
    if command == "run":
        (tmp_path / "p.yaml").write_text(
            f"loader: {{use: auto, path: {source}}}\nwriter: {{use: safetensors, path: {tmp_path}/out}}\n"
        )
        words = [str(tmp_path / "p.yaml")]
    CliRunner().invoke(app, [command, *words, *given])
    nothing = dict.fromkeys(("overwrite", "restart", "verify", "verify_output"), False)
    assert seen == [{**nothing, "workers": None, "memory_limit": None, **told}]


def test_a_unit_has_its_bytes():
    assert isinstance(unit(7), UnitSpec) and unit(7).nbytes == 7
