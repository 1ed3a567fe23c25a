"""What one plan serves many for is what each of them would have been planned as by itself."""

import checkpoints
import forms
import numpy as np
import pytest
from ktforge_plugins import (
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    MoeToBf16,
    SafetensorsLoader,
    SplitExperts,
)

from ktforge import Pipeline, PluginError, Rule, Unsupported, stencils
from ktforge.grouping import group
from ktforge.rules import Targets
from ktforge.source import read_source
from ktforge.stages import alike
from ktforge.testing import MemoryLoader, MemoryWriter
from ktforge.unitplan import plan_unit

PREPROCESS = (SplitExperts(), MoeToBf16())
KT = {"quantize": Int4(), "layout": KtAmx()}
STANDARD = {"quantize": Int4(group_size=32), "layout": CompressedTensors()}


def compare(monkeypatch, loader, **stages):
    """Checks every unit's plan; gives how many of them were planned by the stages, of how many."""
    calls = []

    def counted(pipeline, unit, *rest):
        calls.append(unit.name)
        return plan_unit(pipeline, unit, *rest)

    monkeypatch.setattr(stencils, "plan_unit", counted)
    pipeline = Pipeline(loader=loader, writer=MemoryWriter(), **{"preprocess": PREPROCESS, **stages})
    source = read_source(loader)
    bound = pipeline.bound(source.config)
    targets, own = (Targets(bound.quantize, bound.rules, dense=source.model.experts == 0) for _ in range(2))
    units = group(source.tensors, source.model).ordered(with_extra=True)
    for unit, made in zip(units, stencils.plan_units(bound, units, source.model, targets), strict=True):
        expected = plan_unit(bound, unit, source.model, own)
        assert made == expected
        assert list(made.outputs) == list(expected.outputs)
        assert made.working_bytes == expected.working_bytes
        assert [bool(r.fused) for rs in made.results for r in rs] == [
            bool(r.fused) for rs in expected.results for r in rs
        ]
    assert targets.unused() == own.unused()
    return len(calls), len(units)


@pytest.fixture(params=["bf16", "fp8", "fused"])
def loader(request, tmp_path):
    if request.param == "fp8":
        return SafetensorsLoader(path=checkpoints.fp8_checkpoint(tmp_path / "fp8", (128, 128), attention=True))
    data = checkpoints.tensors()
    data = checkpoints.fuse(data) if request.param == "fused" else data
    return SafetensorsLoader(path=checkpoints.write(tmp_path / "in", data, checkpoints.config(), shards=3))


@pytest.mark.parametrize("stages", [{}, KT, STANDARD], ids=["bf16", "kt-amx", "compressed-tensors"])
def test_one_plan_serves_all_experts_and_layers(monkeypatch, loader, stages):
    planned, units = compare(monkeypatch, loader, **stages)
    # Each kind costs two plans: of numbers that stand for any, and of the first unit, to compare. With two layers
    # that saves something of separate experts alone.
    assert planned <= units


def test_twice_as_many_layers_need_no_more_plans(monkeypatch):
    def planned(layers):
        data = {
            name.replace(".layers.0.", f".layers.{layer}."): array
            for layer in range(layers)
            for name, array in checkpoints.tensors().items()
            if ".layers.0." in name
        }
        model = checkpoints.config(num_hidden_layers=layers)
        return compare(monkeypatch, MemoryLoader(tensors=data, model=model), **KT)[0]

    assert planned(2) == planned(4)


def test_schemes_by_layer(monkeypatch):
    """Experts of equal shapes, which config.json gives another scheme in one layer."""
    size, hidden = checkpoints.SIZE, checkpoints.HIDDEN
    data = {n: a for n, a in checkpoints.tensors().items() if ".experts." not in n}
    for layer in range(checkpoints.LAYERS):
        for expert in range(checkpoints.EXPERTS):
            for projection in checkpoints.PROJECTIONS:
                rows, columns = (hidden, size) if projection == "down" else (size, hidden)
                stem = checkpoints.expert_name(layer, expert, projection).removesuffix("weight")
                data[f"{stem}weight"] = np.zeros((rows, columns), np.int8)
                data[f"{stem}weight_scale"] = np.ones((rows, 1), checkpoints.BF16)
    schemes = {
        layer: {
            "targets": [f"re:.*layers.{layer}.*"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": symmetric},
        }
        for layer, symmetric in enumerate([True, False])
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": schemes}
    loader = MemoryLoader(tensors=data, model=checkpoints.config(quantization_config=quantization))
    refused = Pipeline(loader=loader, preprocess=PREPROCESS, writer=MemoryWriter(), **KT).plan().problems
    # The asymmetric layer lacks its zero points; the other one must not be refused with it, nor hide it.
    assert len(refused) == len(checkpoints.PROJECTIONS)
    assert all("model.layers.1." in problem and "asymmetric" in problem for problem in refused), refused
    del quantization["config_groups"][1]["weights"]["symmetric"]
    compare(monkeypatch, loader, **KT)


RULES = {
    "for the first layer": [Rule(match="*.layers.0.*", quantizer=None)],
    "for another layer": [Rule(match="*.layers.1.*", quantizer=Int8(group_size=32))],
    "for experts of another layer": [Rule(match="*.layers.1.mlp.experts.*", quantizer=Int8(group_size=32))],
    "for an expert": [Rule(match="re:.*experts.[13].", quantizer=Int8(group_size=32))],
    "for a projection": [Rule(match="*.down_proj.weight", quantizer=Int8(group_size=32))],
    "for names that stand for any": [Rule(match=f"*.{stencils.LAYER}.*", quantizer=None)],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_rules_by_number(monkeypatch, loader, rules):
    compare(monkeypatch, loader, rules=rules, **STANDARD)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("form", forms.STORED)
def test_rules_ask_for_the_weights_that_are_quantised(monkeypatch, form, rules):
    data, model = forms.moe(form)
    compare(monkeypatch, MemoryLoader(tensors=data, model=model), rules=rules, **STANDARD)


class Fragile(Int4):
    """A stage that says that names decide nothing, and fails."""

    def plan_key(self):
        return alike

    def plan(self, unit, demand):
        raise KeyError(unit.name)


class Listed(Int4):
    def plan_key(self):
        return lambda unit: [unit.name]


@pytest.mark.parametrize("quantizer", [Fragile(), Listed()])
def test_a_stage_that_fails_is_named_with_a_unit_that_there_is(quantizer):
    data, model = checkpoints.tensors(), checkpoints.config()
    with pytest.raises(PluginError, match=r"plugin int4 .* failed on model\.layers\.0\."):
        Pipeline(
            loader=MemoryLoader(tensors=data, model=model), quantize=quantizer, layout=KtAmx(), writer=MemoryWriter()
        ).plan()


class ByLayer(Int4):
    """A subclass that plans by the layer's number, and does not say so."""

    def plan(self, unit, demand):
        if unit.layer == 1:
            raise Unsupported("layer 1 is not for me")
        return super().plan(unit, demand)


def test_a_subclass_is_asked_about_each_unit():
    plan = Pipeline(
        loader=MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config()),
        quantize=ByLayer(), layout=KtAmx(), writer=MemoryWriter(),
    ).plan()  # fmt: skip
    assert plan.problems == ("model.layers.1.mlp.experts.0 (and 3 more): layer 1 is not for me",)
