"""Plugins that do what none should, in any method of any stage: their names stand in the error, and ktforge ends."""

import inspect

import checkpoints
import pytest
from ktforge_plugins import Int4, KtAmx, MoeToBf16
from typer.testing import CliRunner

from ktforge import KtforgeError, Pipeline, PluginError
from ktforge.cli import app
from ktforge.testing import MemoryLoader, MemoryWriter


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


class Rude(BaseException):
    pass


def exits(*args, **options):
    raise SystemExit(0)


def raises_speechless(*args, **options):
    raise Speechless


def raises_rude(*args, **options):
    raise Rude("rude")


def returns_none(*args, **options):
    return None


MISBEHAVIOURS = [exits, raises_speechless, raises_rude, returns_none]
STAGES = {"loader": MemoryLoader, "preprocess": MoeToBf16, "quantize": Int4, "layout": KtAmx, "writer": MemoryWriter}
#: Those that a run has to call, stage by stage.
CALLED = {
    "loader": ["scan", "read", "config"],
    "preprocess": ["plan", "apply"],
    "quantize": ["plan", "quantize"],
    "layout": ["demand", "plan", "pack"],
    "writer": ["plan", "open"],
}


def odd(stage, method, does):
    """The stage with one method that does so; the fused way is shut, so that each step is taken."""
    body = {"name": f"odd-{stage}", method: does, "__module__": __name__}
    if stage == "layout":
        body["fused"] = lambda self, quantizer, spec: None
    return type("Odd", (STAGES[stage],), body)


def pipeline(stage, cls):
    """An INT4 conversion, with one stage replaced."""
    made = {
        "loader": lambda c: c(tensors=checkpoints.tensors(), model=checkpoints.config()),
        "preprocess": lambda c: [c()],
        "quantize": lambda c: c(),
        "layout": lambda c: c(),
        "writer": lambda c: c(),
    }
    layout = odd("layout", "stage", "layout")
    chosen = {**STAGES, "layout": layout, stage: cls}
    return Pipeline(**{name: made[name](chosen[name]) for name in made})


KIND = [
    (stage, method, does)
    for stage, methods in CALLED.items() for method in methods for does in MISBEHAVIOURS
    if (method, does) != ("pack", returns_none)  # which is what it returns
]  # fmt: skip


@pytest.mark.parametrize(("stage", "method", "does"), KIND)
def test_from_python(stage, method, does):
    with pytest.raises(KtforgeError) as caught:
        pipeline(stage, odd(stage, method, does)).run()
    assert isinstance(caught.value, PluginError) and f"plugin odd-{stage}" in str(caught.value)


PLUGIN = """
import ktforge
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


class Rude(BaseException):
    pass


def exits(*args, **options):
    raise SystemExit(0)


def raises_speechless(*args, **options):
    raise Speechless


def raises_rude(*args, **options):
    raise Rude("rude")


def returns_none(*args, **options):
    return None


class Odd({base}):
    name = "odd-{stage}"
    {method} = {does}
    {more}


@ktforge.hookimpl
def ktforge_{hook}():
    return [Odd]
"""


@pytest.mark.parametrize(("stage", "method", "does"), KIND)
def test_from_the_command_line(source, tmp_path, stage, method, does):
    """Whatever it does, the exit code is ktforge's, and no traceback is shown."""
    bases = {"loader": "SafetensorsLoader", "writer": "SafetensorsWriter"}
    hooks = {"loader": "loaders", "preprocess": "preprocessors", "quantize": "quantizers", "layout": "layouts"}
    (tmp_path / "odd.py").write_text(
        PLUGIN.format(
            stage=stage, method=method, does=does.__name__, base=bases.get(stage, STAGES[stage].__name__),
            hook=hooks.get(stage, "writers"), more="fused = returns_none" if stage == "layout" else "",
        )
    )  # fmt: skip
    chosen = {"loader": "safetensors", "preprocess": "moe-to-bf16", "quantize": "int4", "layout": "kt-amx",
              "writer": "safetensors", stage: f"odd-{stage}"}  # fmt: skip
    (tmp_path / "pipeline.yaml").write_text(
        f"version: 1\nloader: {{use: {chosen['loader']}, path: {source}}}\n"
        f"preprocess: [{{use: {chosen['preprocess']}}}]\nquantize: {{use: {chosen['quantize']}}}\n"
        f"layout: {{use: {chosen['layout']}}}\nwriter: {{use: {chosen['writer']}, path: {tmp_path / 'out'}}}\n"
    )
    done = CliRunner().invoke(app, ["run", str(tmp_path / "pipeline.yaml"), "--plugin", str(tmp_path / "odd.py")])
    assert isinstance(done.exception, PluginError) and f"plugin odd-{stage}" in str(done.exception), done.output
    assert not (tmp_path / "out" / "ktforge_manifest.json").exists()


def test_every_method_is_tried_or_asked_seldom():
    """What an author has to write is above; what else there is has a default that ktforge's own check."""
    for stage, cls in STAGES.items():
        abstract = {name for base in inspect.getmro(cls) for name in getattr(base, "__abstractmethods__", ())}
        assert abstract <= set(CALLED[stage]), stage
