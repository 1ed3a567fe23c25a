"""The executor: equal results from any number of workers, and plugins that break their contract named at their step."""

import hashlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, Int8, KtAmx, KtFolderWriter, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import (
    CheckpointError,
    Layout,
    PackedSpec,
    Pipeline,
    PluginError,
    Preprocessor,
    QuantPart,
    QuantUnit,
    Registry,
    TensorSpec,
    Unit,
    hookimpl,
    native,
)
from ktforge.testing import MemoryLoader, MemoryWriter

EXPERT = "model.layers.0.mlp.experts.0"


def tree(folder):
    """Relative path → hash of every file."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("writer", [SafetensorsWriter, KtFolderWriter])
def test_the_output_depends_on_neither_workers_nor_isa(source, tmp_path, writer):
    trees = []
    before = native.current_isa()
    for name, supported in native.isas().items():
        for workers in (1, 2, 7):
            if supported:
                native.use_isa(name)
                pipeline = Pipeline(
                    loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(),
                    writer=writer(path=tmp_path / "out"),
                )  # fmt: skip
                pipeline.run(overwrite=True, workers=workers)
                trees.append(tree(tmp_path / "out"))
    native.use_isa(before)
    assert len(trees) >= 3 and all(t == trees[0] for t in trees)
    assert "ktforge_manifest.json" in trees[0]


def test_observers_see_the_plan_and_every_unit():
    seen = []

    class Observer:
        @hookimpl
        def ktforge_planned(self, plan):
            seen.append(plan)

        @hookimpl
        def ktforge_unit_written(self, spec, seconds):
            assert seconds >= 0
            seen.append(spec.name)

    plan = memory_pipeline().run(workers=2, registry=Registry(Observer())).plan
    assert seen[0] is plan
    assert sorted(seen[1:]) == sorted(u.source.name for u in plan.units)


def memory_pipeline(**changes):
    stages = {
        "loader": MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config()),
        "preprocess": [MoeToBf16()],
        "quantize": Int4(),
        "layout": KtAmx(),
        "writer": MemoryWriter(),
    }
    return Pipeline(**{**stages, **changes})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_stops_the_run(out, value):
    data = checkpoints.tensors()
    name = checkpoints.expert_name(1, 2, "down")
    data[name][7, 300] = value
    loader = MemoryLoader(tensors=data, model=checkpoints.config())
    pipeline = memory_pipeline(loader=loader, writer=SafetensorsWriter(path=out))
    with pytest.raises(CheckpointError, match=f"{name} is NaN or infinite at row 7, column 300"):
        pipeline.run(workers=2)
    assert not out.exists()


class Raises(KtAmx):
    name: ClassVar[str] = "raises"

    def pack(self, unit, out):
        raise IndexError("oops")


class RaisesInPlan(KtAmx):
    name: ClassVar[str] = "raises-in-plan"

    def plan(self, spec):
        raise KeyError("oops")


class WrongSize(KtAmx):
    name: ClassVar[str] = "wrong-size"

    def plan(self, spec):
        good = super().plan(spec)
        first = good.tensors[0]
        wrong = TensorSpec(first.name, first.dtype, (first.shape[0] - 1,))
        return PackedSpec((wrong, *good.tensors[1:]), good.format)


class WrongCodes(Int4):
    name: ClassVar[str] = "wrong-codes"

    def quantize(self, unit, spec):
        made = super().quantize(unit, spec)
        return QuantUnit(spec, tuple(QuantPart(p.codes[:-1], p.scales) for p in made.parts))


class FewerParts(Int4):
    name: ClassVar[str] = "fewer-parts"

    def quantize(self, unit, spec):
        return QuantUnit(spec, super().quantize(unit, spec).parts[:-1])


class Doubles(Preprocessor):
    name: ClassVar[str] = "doubles"

    def plan(self, unit):
        return [unit]

    def apply(self, unit):
        yield unit
        yield unit


class Swallows(Doubles):
    name: ClassVar[str] = "swallows"

    def apply(self, unit):
        return iter(())


class RaisesAtOnce(Doubles):
    name: ClassVar[str] = "raises-at-once"

    def apply(self, unit):  # no generator
        return [unit.tensors["nowhere"]]


class OtherDtype(Doubles):
    name: ClassVar[str] = "other-dtype"

    def apply(self, unit):
        yield Unit(unit.spec, {r: a.astype(np.float32) for r, a in unit.tensors.items()})


class LosesARole(Doubles):
    name: ClassVar[str] = "loses-a-role"

    def apply(self, unit):
        yield Unit(unit.spec, {})


class BadLoader(MemoryLoader):
    name: ClassVar[str] = "bad-loader"

    def read(self, spec):
        return super().read(spec).T


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"layout": Raises()}, rf"^plugin raises \(.*, layout\) failed on {EXPERT}: IndexError: oops"),
        ({"layout": RaisesInPlan()}, rf"^plugin raises-in-plan \(.*, layout\) failed on {EXPERT}: KeyError: 'oops'"),
        ({"layout": WrongSize()}, rf"^plugin wrong-size \(.*, layout\) failed on {EXPERT}: ValueError"),
        ({"quantize": WrongCodes()}, rf"^plugin wrong-codes .* delivered the codes of {EXPERT} gate 0 as int8 \[255"),
        ({"quantize": FewerParts()}, rf"^plugin fewer-parts .* delivered 5 parts of {EXPERT}; 6 were planned"),
        ({"preprocess": [Doubles()]}, "^plugin doubles .* made more units of .* than it planned"),
        ({"preprocess": [Swallows()]}, "^plugin swallows .* made fewer units than it planned for"),
        ({"preprocess": [RaisesAtOnce()]}, r"^plugin raises-at-once .* failed on .*: KeyError: 'nowhere' "),
        ({"preprocess": [OtherDtype()]}, r"^plugin other-dtype .* delivered .* as float32 .*; BF16 \[.* was planned"),
        ({"preprocess": [LosesARole()]}, r"^plugin loses-a-role .* delivered \[\] of .*; \['weight'\] were planned"),
        (
            {"loader": BadLoader(tensors=checkpoints.tensors(), model=checkpoints.config())},
            "^plugin bad-loader .* delivered model.embed_tokens.weight as bfloat16",
        ),
    ],
)  # fmt: skip
def test_a_plugin_that_breaks_its_contract_is_blamed_at_its_step(stage, message):
    pipeline = memory_pipeline(**stage)
    with pytest.raises(PluginError, match=message) as caught:
        pipeline.run(workers=1)
    assert pipeline.writer.tensors == {}
    assert "failed on" not in str(caught.value) or caught.value.__cause__ is not None


def with_sink(write):
    """A pipeline into a sink of another's that writes like this."""

    class Writes(MemoryWriter):
        name: ClassVar[str] = "writes"

        @contextmanager
        def open(self, plan, **options):
            yield SimpleNamespace(has=lambda tensor: False, write=write)

    return memory_pipeline(writer=Writes())


def test_what_a_sink_raises_is_blamed_on_its_writer():
    def fails(tensor, data, row=None):
        raise KeyError("oops")

    def full(tensor, data, row=None):
        raise OSError(28, "No space left on device", "here")

    with pytest.raises(PluginError, match=r"^plugin writes \(.*, writer\) failed on \S+: KeyError: 'oops'"):
        with_sink(fails).run(workers=1)
    with pytest.raises(OSError, match="No space left"):
        with_sink(full).run(workers=1)


def test_a_sink_that_knows_no_rows_gets_whole_tensors():
    names = []
    plan = with_sink(lambda tensor, data: names.append(tensor.name)).run(workers=1).plan
    assert sorted(names) == sorted(t.name for f in plan.files for t in f.tensors)


def test_a_preprocessor_may_turn_one_unit_into_many():
    """A fused checkpoint: one tensor a layer holds all experts' projections."""

    class Split(Preprocessor):
        name: ClassVar[str] = "split"

        def plan(self, unit):
            (role, tensor), *_ = unit.tensors.items()
            if role != "fused":
                return [unit]
            return [unit.with_tensors({"weight": self.part(tensor, e)}) for e in range(tensor.shape[0])]

        def apply(self, unit):
            for e, spec in enumerate(self.plan(unit.spec)):
                yield Unit(spec, {"weight": unit.tensors["fused"][e]} if "fused" in unit.tensors else unit.tensors)

        @staticmethod
        def part(tensor, e):
            return TensorSpec(f"{tensor.name}.{e}", tensor.dtype, tensor.shape[1:])

    data = checkpoints.tensors()
    fused = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    loader = MemoryLoader(tensors={**data, "model.fused": fused}, model=checkpoints.config())
    writer = MemoryWriter()
    Pipeline(loader=loader, preprocess=[Split()], writer=writer).run()
    assert all(np.array_equal(writer.tensors[f"model.fused.{e}"], fused[e]) for e in range(3))
    assert writer.tensors.keys() == {*data, *(f"model.fused.{e}" for e in range(3))}


def test_int8_and_int4_of_one_checkpoint_differ_in_size():
    sizes = [memory_pipeline(quantize=q).plan().output_bytes for q in (Int4(), Int8())]
    weights = checkpoints.LAYERS * checkpoints.EXPERTS * 3 * checkpoints.SIZE * checkpoints.HIDDEN
    assert sizes[1] - sizes[0] == weights // 2


def test_layout_is_abstract():
    with pytest.raises(TypeError):
        Layout()
