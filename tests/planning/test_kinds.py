"""What one plan serves many for is what each of them would have been planned as by itself."""

from pathlib import Path

import checkpoints
import forms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ktforge_plugins import (
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    MoeToBf16,
    SafetensorsLoader,
    SplitExperts,
)

from ktforge import Pipeline, PluginError, Rule, TensorSpec, Unsupported
from ktforge.contract.stages import alike
from ktforge.model.config import read_model_config
from ktforge.model.source import read_source
from ktforge.model.units import units_of
from ktforge.planning import kinds
from ktforge.planning.targets import Targets
from ktforge.planning.unit import plan_unit
from ktforge.testing import MemoryLoader, MemoryWriter

PREPROCESS = (SplitExperts(), MoeToBf16())
KT = {"quantize": Int4(), "layout": KtAmx()}
ANY_MODEL = read_model_config(checkpoints.config(num_hidden_layers=3))
STANDARD = {"quantize": Int4(group_size=32), "layout": CompressedTensors()}


def compare(monkeypatch, loader, **stages):
    """Checks every unit's plan; gives how many of them were planned by the stages, of how many."""
    calls = []

    def counted(pipeline, unit, *rest):
        calls.append(unit.name)
        return plan_unit(pipeline, unit, *rest)

    monkeypatch.setattr(kinds, "plan_unit", counted)
    pipeline = Pipeline(loader=loader, writer=MemoryWriter(), **{"preprocess": PREPROCESS, **stages})
    source = read_source(loader)
    bound = pipeline.bound(source.config)
    targets, own = (Targets(bound.quantize, bound.rules, dense=source.model.experts == 0) for _ in range(2))
    units = units_of(source.tensors, source.model).ordered(with_extra=True)
    for unit, made in zip(units, kinds.plan_units(bound, units, source.model, targets), strict=True):
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


NUMBERS = [str(kinds.LAYER), str(kinds.EXPERT), "0", "1", "x.0", "x.1.y"]
PLACES = st.tuples(st.sampled_from([None, Path("a"), Path("b")]), st.integers(0, 3))
PARAMETERS = st.sampled_from(["weight", "bias", "0", "weight_scale_inv"])
OTHERS = st.tuples(
    st.integers(0, 2), st.sampled_from([*NUMBERS, "self_attn.q_proj", "experts.1"]), PARAMETERS,
    st.sampled_from([(4, 4), (8,), (256, 256), (0, 4)]), PLACES,
)  # fmt: skip
EXPERTS = st.tuples(
    st.integers(0, 2), st.integers(0, 3), st.sampled_from(sorted(checkpoints.PROJECTIONS)),
    st.sampled_from(["model.", ""]), st.sampled_from(["weight"] * 9 + NUMBERS[:4]), st.booleans(), PLACES,
)  # fmt: skip


@given(st.lists(EXPERTS, min_size=1, max_size=30), st.lists(OTHERS, max_size=20), st.sampled_from([{}, KT, STANDARD]))
def test_whatever_the_names_shapes_and_places(experts, others, stages):
    """Names that hold the numbers that stand for any, refusals among the plans, tensors in files and in memory."""
    found = {}
    for layer, expert, projection, prefix, parameter, odd, place in experts:
        name = checkpoints.expert_name(layer, expert, projection).removeprefix("model.").removesuffix("weight")
        rows, columns = checkpoints.SIZE, checkpoints.HIDDEN
        shape = (4, 4) if odd else (columns, rows) if projection == "down" else (rows, columns)
        found[f"{prefix}{name}{parameter}"] = shape, place
    for layer, middle, parameter, shape, place in others:
        found[f"model.layers.{layer}.{middle}.{parameter}"] = shape, place
    check([TensorSpec(n, checkpoints.BF16, s, *p) for n, (s, p) in found.items()], stages)


@pytest.mark.parametrize("stages", [{}, KT, STANDARD], ids=["bf16", "kt-amx", "compressed-tensors"])
def test_tensors_in_memory_that_are_found_by_an_offset(stages):
    arrays = checkpoints.tensors().items()
    check([TensorSpec(n, a.dtype, a.shape, None, place) for place, (n, a) in enumerate(arrays)], stages)


def check(specs, stages):
    """That each unit of these tensors has the plan, or the refusal, that it has by itself."""
    units = units_of(specs, ANY_MODEL).ordered(True)
    loader = MemoryLoader(tensors={}, model=checkpoints.config(num_hidden_layers=3))
    bound = Pipeline(loader=loader, writer=MemoryWriter(), preprocess=PREPROCESS, **stages).bound(loader.config())
    targets = Targets(bound.quantize, bound.rules, dense=False)
    for unit, made in zip(units, kinds.plan_units(bound, units, ANY_MODEL, targets), strict=True):
        try:
            expected = plan_unit(bound, unit, ANY_MODEL, targets)
        except Unsupported as refusal:
            assert isinstance(made, Unsupported) and made.problems == refusal.problems
        else:
            assert made == expected and made.source is unit


@pytest.mark.parametrize("kinds", [5, 300])
def test_kinds_are_planned_once_however_many_there_are(monkeypatch, kinds):
    data = {
        f"model.layers.{layer}.odd{kind}.weight": np.zeros((1, 1 + kind), np.float32)
        for layer in range(4) for kind in range(kinds)
    }  # fmt: skip
    data |= checkpoints.tensors()
    planned, units = compare(monkeypatch, MemoryLoader(tensors=data, model=checkpoints.config(num_hidden_layers=4)))
    assert planned < 2 * kinds + 30 < units + 30


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
    "for names that stand for any": [Rule(match=f"*.{kinds.LAYER}.*", quantizer=None)],
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
