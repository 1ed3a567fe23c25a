"""A refusal has a sentence; a stage that refuses without one is at fault, and nothing is lost for it."""

from types import SimpleNamespace

import pytest
from ktforge_plugins import CompressedTensors, Int4, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import (
    CheckpointError,
    KtforgeError,
    NumberFormat,
    Pipeline,
    PlanError,
    PluginError,
    Registry,
    Unsupported,
    hookimpl,
)
from ktforge.contract.stages import alike
from ktforge.inspection.description import describe
from ktforge.inspection.look import Look
from ktforge.testing import MemoryWriter

KINDS = [KtforgeError, *KtforgeError.__subclasses__()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problems", [(), ("",), ("one", ""), (None,)])
def test_an_error_needs_a_sentence(kind, problems):
    with pytest.raises(TypeError, match=f"{kind.__name__} needs a sentence that says what is wrong"):
        kind(*problems)


class Silent(MoeToBf16):
    """Refuses one expert without a word."""

    def plan(self, unit):
        if unit.expert == 3:
            raise Unsupported
        return super().plan(unit)


class SilentLayout(CompressedTensors):
    def check(self, results):
        raise Unsupported


class SilentWriter(SafetensorsWriter):
    def plan(self, tensors, formats):
        raise Unsupported


@pytest.mark.parametrize("stage", ["preprocess", "layout", "writer"])
def test_a_refusal_without_a_word_loses_nothing(source, out, stage):
    stages = {
        "preprocess": [Silent() if stage == "preprocess" else MoeToBf16()],
        "layout": SilentLayout() if stage == "layout" else CompressedTensors(),
        "writer": SilentWriter(path=out) if stage == "writer" else SafetensorsWriter(path=out),
    }
    pipeline = Pipeline(loader=SafetensorsLoader(path=source), quantize=Int4(group_size=32), **stages)
    with pytest.raises(PluginError, match="TypeError: Unsupported needs a sentence that says what is wrong"):
        pipeline.run()
    assert not out.exists()


class NoGroups(Int4):
    def plan(self, unit, demand):
        return super().plan(unit, demand)._replace(**CHANGE)


CHANGE: dict = {}


@pytest.mark.parametrize("change", [{"group_size": 0}, {"group_size": -32}, {"bits": 0}, {"bits": 9}, {"bits": "4"}])
def test_codes_of_no_size_are_the_quantizers_fault(source, change, monkeypatch):
    monkeypatch.setitem(globals(), "CHANGE", change)
    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=NoGroups(group_size=32), layout=CompressedTensors(),
        writer=MemoryWriter(),
    )  # fmt: skip
    with pytest.raises(PluginError, match=r"^plugin int4 .*quantize\) planned codes of .* bits in groups of"):
        pipeline.plan()


class Remarks(NumberFormat):
    """Not a format of any weight."""

    name = "remarks"

    def plan_key(self):
        return alike

    def stored(self, parameters):
        return None

    def dequantize(self, arrays, parameters):
        raise NotImplementedError

    def remarks(self, loader, model, experts):
        return SAID()


def said():
    return ()


SAID = said


@pytest.mark.parametrize(
    ("says", "remarks", "wrong"),
    [
        (lambda: ["one", "two"], ("one", "two"), ()),
        (lambda: "one sentence", ("one sentence",), ()),
        (lambda: ["x" * 5000], ("x" * 1000,), ()),
        (lambda: [5], (), ("planned int for a remark; str was expected",)),
        (lambda: 1 / 0, (), ("ZeroDivisionError",)),
        (lambda: (_ for _ in ()).throw(CheckpointError("part cannot be read")), (), ("part cannot be read",)),
    ],
)
def test_remarks_that_fail_leave_all_else_to_be_said(source, monkeypatch, says, remarks, wrong):
    monkeypatch.setitem(globals(), "SAID", says)
    plugin = SimpleNamespace(__name__="theirs", ktforge_preprocessors=hookimpl(lambda: [Remarks]))
    seen = describe(Look.at(source, Registry.installed(plugin)))
    assert seen.remarks == remarks and seen.experts and seen.targets["convert --quant-method int4"] == ()
    assert len(seen.problems) == len(wrong) and all(w in p for w, p in zip(wrong, seen.problems, strict=True))


def test_a_plan_with_problems_says_them(source, out):
    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Int4(group_size=96), layout=CompressedTensors(),
        writer=SafetensorsWriter(path=out),
    )  # fmt: skip
    with pytest.raises(PlanError) as caught:
        pipeline.run()
    assert all(caught.value.problems)


class RawWriter(SafetensorsWriter):
    """Its outputs no engine is known to read."""

    name = "raw"


def test_an_output_is_served_as_its_layouts_readers_take_it(source, out):
    loader = SafetensorsLoader(path=source)

    def serving(writer):
        stages = {"quantize": Int4(group_size=32), "layout": CompressedTensors(), "writer": writer}
        return Pipeline(loader=loader, **stages).plan().serving

    assert str(out) in serving(SafetensorsWriter(path=out))
    assert serving(RawWriter(path=out)) is None
