from pathlib import Path

import checkpoints
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ktforge_plugins import Int4, KtAmx, MoeToBf16

from ktforge import CheckpointError, Pipeline, TensorSpec
from ktforge.contract.tensors import BF16, DTYPES
from ktforge.model.architectures import architectures, likely_architectures
from ktforge.model.config import read_model_config
from ktforge.model.units import CARRIERS, units_of
from ktforge.testing import MemoryLoader, MemoryWriter

PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
FAMILIES = checkpoints.architectures()
PER_EXPERT = [
    "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "minimax", "minimax_m2", "olmoe",
    "glm_moe_dsa", "qwen3_5_moe_text",
]  # fmt: skip


def specs(family: str) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPES[dtype], shape) for name, (dtype, shape) in FAMILIES[family][1].items()]


@pytest.mark.parametrize("family", PER_EXPERT)
def test_every_family_is_grouped_whole(family):
    model = read_model_config(FAMILIES[family][0])
    grouping = units_of(specs(family), model)
    assert grouping.problems.lines() == ()
    assert {(u.layer, u.expert) for u in grouping.experts} == {
        (layer, expert) for layer in model.moe_layers for expert in range(model.experts)
    }
    for unit in grouping.experts:
        assert list(unit.tensors) == ["gate.weight", "up.weight", "down.weight"]
        size, hidden = unit.tensors["gate.weight"].shape
        assert (size, hidden) == (model.expert_size, model.hidden)
        assert unit.tensors["down.weight"].shape == (hidden, size)
    grouped = sum(len(u.tensors) for u in [*grouping.experts, *grouping.others])
    assert grouped == len(FAMILIES[family][1])


def test_mixtral_w3_goes_up_and_w2_comes_down():
    unit = units_of(specs("mixtral"), read_model_config(FAMILIES["mixtral"][0])).experts[0]
    assert {role: t.name.split(".")[-2] for role, t in unit.tensors.items()} == {
        "gate.weight": "w1", "up.weight": "w3", "down.weight": "w2",
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_dense_model_is_called_one(family):
    loader = MemoryLoader(tensors={}, model=FAMILIES[family][0])
    for stages in ({"preprocess": [MoeToBf16()]}, {"quantize": Int4(), "layout": KtAmx()}):
        with pytest.raises(CheckpointError, match=rf"this is a dense model \(model_type {family};"):
            Pipeline(loader=loader, writer=MemoryWriter(), **stages).plan()


@pytest.mark.parametrize("number", ["01", "00", "\N{ARABIC-INDIC DIGIT ONE}", "1000000"])
def test_a_number_that_no_writer_spells_so_is_no_expert_and_no_layer(number):
    model = read_model_config(FAMILIES["qwen3_moe"][0])
    odd = [f"model.layers.{n}.mlp.experts.{e}.gate_proj.weight" for n, e in ((0, number), (number, 0))]
    grouping = units_of([*specs("qwen3_moe"), *(TensorSpec(n, BF16, (8, 8)) for n in odd)], model)
    assert grouping.problems.lines() == ()
    assert {u.name: u.layer for u in grouping.others if ".experts." in u.name} == {odd[0]: 0, odd[1]: None}
    packed = {n: TensorSpec(n, np.dtype(np.int8), (8,)) for n in [f"blk.0.ffn_up_exps.{number}.numa.0.weight"]}
    assert list(KtAmx().find(packed, FAMILIES["qwen3_moe"][0], lambda spec: None)) == []


def test_shared_experts_are_not_routed_ones():
    grouping = units_of(specs("deepseek_v3"), read_model_config(FAMILIES["deepseek_v3"][0]))
    assert sum("shared_experts" in u.name for u in grouping.others) == 6
    assert not any("shared" in t.name for u in grouping.experts for t in u.tensors.values())


def test_a_wrapper_prefix_is_dropped_and_text_config_is_read():
    model = {"model_type": "wrapper", "text_config": checkpoints.config()}
    for prefix in ("model.language_model.", "language_model.model."):
        wrapped = [
            TensorSpec(name.replace("model.", prefix, 1), array.dtype, array.shape)
            for name, array in checkpoints.tensors().items()
        ]
        grouping = units_of(wrapped, read_model_config(model))
        assert len(grouping.experts) == checkpoints.LAYERS * checkpoints.EXPERTS
        assert grouping.problems.lines() == ()


def test_a_wrapper_prefix_within_a_layer_is_none():
    data = {n.replace(".experts.3.", ".experts.language_model.3."): a for n, a in checkpoints.tensors().items()}
    plan = Pipeline(loader=MemoryLoader(tensors=data, model=checkpoints.config()), writer=MemoryWriter()).plan()
    assert plan.problems[0] == "layer 0: expert 3 missing; config.json announces 4"


def test_an_unknown_model_type_is_matched_by_its_names():
    model = read_model_config(checkpoints.config(model_type="brand_new"))
    data = [TensorSpec(n, a.dtype, a.shape) for n, a in checkpoints.tensors().items()]
    assert len(units_of(data, model).experts) == checkpoints.LAYERS * checkpoints.EXPERTS


def test_unknown_expert_names_are_an_error_that_shows_one():
    data = [TensorSpec("model.layers.0.moe.expert_7.in.weight", BF16, (4, 4))]
    with pytest.raises(
        CheckpointError, match=r"no tensor has a known expert name .* nearest is model.layers.0.moe"
    ) as one:
        units_of(data, read_model_config(checkpoints.config()))
    assert "get a copy as transformers saves it" in str(one.value)


def problems(drop=(), add=(), **changes) -> str:
    names = [n for n in checkpoints.tensors() if not any(d in n for d in drop)]
    made = [TensorSpec(n, BF16, (4, 4)) for n in [*names, *add]]
    return "\n".join(units_of(made, read_model_config(checkpoints.config(**changes))).problems.lines())


def test_gaps_are_named():
    assert "layer 1: expert 2 missing; config.json announces 4" in problems(drop=["layers.1.mlp.experts.2."])
    assert "layer 1: experts 1, 2 missing" in problems(drop=["layers.1.mlp.experts.1.", "layers.1.mlp.experts.2."])
    assert "experts.3: has no up projection" in problems(drop=["layers.0.mlp.experts.3.up_proj"])
    assert "layer 1: config.json announces 4 experts here, the checkpoint has none" in problems(
        drop=["layers.1.mlp.experts."]
    )
    assert "layer 0: has expert 3, but config.json announces only 3" in problems(num_experts=3)
    dense = problems(mlp_only_layers=[1])
    assert "layer 1: config.json calls this layer dense" in dense and "correct the field that lists dense" in dense


def test_layers_beyond_the_model_are_extra_and_whole():
    add = ["model.layers.2.mlp.experts.0.gate_proj.weight", "model.layers.2.eh_proj.weight", "mtp.norm.weight"]
    names = [*checkpoints.tensors(), *add]
    grouping = units_of([TensorSpec(n, BF16, (4, 4)) for n in names], read_model_config(checkpoints.config()))
    assert [u.name for u in grouping.extra] == ["model.layers.2.mlp.experts.0", *add[1:]]
    assert grouping.problems.lines() == ()


def test_an_fp8_weight_and_its_scale_are_one_unit():
    names = ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight_scale_inv"]
    made = [TensorSpec(n, BF16, (4, 4)) for n in [*reversed(names), *checkpoints.tensors()] if n.count("o_proj")]
    made += [TensorSpec(n, BF16, (4, 4)) for n in checkpoints.tensors() if "experts" in n]
    grouping = units_of(made, read_model_config(checkpoints.config()))
    units = [u for u in grouping.others if u.name == names[0]]
    assert [list(u.tensors) for u in units] == [["weight", "weight_scale_inv"]]


@given(st.permutations(list(checkpoints.tensors())))
def test_the_order_of_the_names_does_not_matter(names):
    model = read_model_config(checkpoints.config())
    units = units_of([TensorSpec(n, BF16, (4, 4)) for n in names], model).ordered(True)
    keys = [(u.layer, u.expert) for u in units if u.is_expert]
    assert keys == sorted(keys)
    assert [list(u.tensors) for u in units if u.is_expert] == [["gate.weight", "up.weight", "down.weight"]] * len(keys)


NAME_PARTS = st.tuples(
    st.sampled_from(["", "model."]), st.sampled_from(["0", "1", "10", "01"]), st.sampled_from(["0", "1", "12", "012"]),
    st.sampled_from(["gate_proj", "up_proj", "down_proj", "gate_up_proj", "other"]),
    st.sampled_from(["weight", "weight_scale_inv", "bias", "x.y"]),
)  # fmt: skip


@given(st.lists(NAME_PARTS))
def test_a_name_has_its_place_whatever_stands_before_it(parts):
    names = [f"{m}layers.{layer}.mlp.experts.{expert}.{p}.{parameter}" for m, layer, expert, p, parameter in parts]
    (qwen,) = (a for a in architectures() if "qwen3_moe" in a.model_types)
    together = list(qwen.places(names))
    assert together == [place for name in names for place in qwen.places([name])]
    numbers = {"0", "1", "10", "12"}
    for (_, layer, expert, projection, parameter), place in zip(parts, together, strict=True):
        known = {layer, expert} <= numbers and projection in PROJECTIONS and parameter != "x.y"
        assert place == ((int(layer), int(expert), f"{PROJECTIONS[projection]}.{parameter}") if known else None)


@pytest.mark.parametrize("model_type", ["", "qwen3_moe", "mixtral", "of nobody"])
def test_likely_architectures_are_all_and_those_of_the_model_type_come_first(model_type):
    likely = list(likely_architectures(model_type))
    assert sorted(likely, key=architectures().index) == list(architectures())
    claimed = [model_type in a.model_types for a in likely]
    assert claimed == sorted(claimed, reverse=True)
    assert any(claimed) == (model_type in {"qwen3_moe", "mixtral"})


def test_architecture_files_claim_each_model_type_once():
    """For single experts; a family may fuse in two ways, under names of their own."""
    claimed = [t for a in architectures() if a.experts for t in a.model_types]
    assert len(claimed) == len(set(claimed))
    for model_type in set(claimed):
        fused = [a.fused for a in architectures() if a.fused and model_type in a.model_types]
        assert len({f.experts for f in fused}) == len(fused) or len({tuple(f.projections.values()) for f in fused}) > 1
    for architecture in architectures():
        assert architecture.experts or architecture.fused
        assert not architecture.experts or set(architecture.projections) == {"gate", "up", "down"}
        assert not architecture.fused or set(architecture.fused.projections) in (
            {"gate_up", "down"}, {"gate", "up", "down"},
        )  # fmt: skip


@pytest.mark.parametrize("architecture", architectures(), ids=lambda a: a.example)
def test_each_naming_scheme_is_found_by_its_names(architecture):
    names = []
    places = [(layer, expert) for layer in range(2) for expert in range(4)]
    if architecture.experts:
        names = [
            architecture.experts.format(layer=layer, expert=e, projection=p, parameter="weight")
            for layer, e in places for p in architecture.projections.values()
        ]  # fmt: skip
    else:
        names = [
            architecture.fused.experts.format(layer=layer, projection=p)
            for layer in range(2) for p in architecture.fused.projections.values()
        ]  # fmt: skip
    model = read_model_config(checkpoints.config(model_type=architecture.model_types[0]))
    for drop in ("", "model."):
        made = [TensorSpec(n.removeprefix(drop), BF16, (4, 4, 4)) for n in names]
        grouping = units_of(made, model)
        assert grouping.problems.lines() == () and grouping.others == []
        assert sum(u.experts for u in grouping.experts) == len(places)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_fused_experts_are_one_unit_a_layer(family):
    model = read_model_config(FAMILIES[family][0])
    grouping = units_of(specs(family), model)
    assert grouping.problems.lines() == ()
    assert [(u.layer, u.expert, u.experts, u.fused) for u in grouping.experts] == [
        (layer, None, model.experts, True) for layer in (0, 1)
    ]
    roles = ["gate_up.weight", "gate_up.bias", "down.weight", "down.bias"]
    assert list(grouping.experts[0].tensors) == [r for r in roles if family == "gpt_oss" or r.endswith("weight")]
    assert not any("experts." in u.name and "shared" not in u.name for u in grouping.others)


def test_gaps_in_fused_experts_are_named():
    made = [
        TensorSpec("model.layers.0.mlp.experts.gate_up_proj", BF16, (3, 8, 4)),
        TensorSpec("model.layers.1.mlp.experts.gate_up_proj", BF16, (4, 8, 4)),
        TensorSpec("model.layers.1.mlp.experts.down_proj", BF16, (4, 4, 4)),
    ]
    lines = units_of(made, read_model_config(checkpoints.config())).problems.lines()
    assert lines == (
        "model.layers.0.mlp.experts: has no down projection",
        "layer 0: expert 3 missing; config.json announces 4",
    )


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mtp.layers.0.mlp.experts.0.gate_proj.weight", None),
        ("model.mtp.norm.weight", None),
        ("model.layers.2.eh_proj.weight", None),
        ("model.enorm.weight", Path("mtp.safetensors")),
        ("model.enorm.weight", Path("model_mtp.safetensors")),
    ],
)
def test_prediction_heads_are_extra(name, file):
    made = [TensorSpec(n, BF16, (4, 4)) for n in checkpoints.tensors()]
    grouping = units_of([*made, TensorSpec(name, BF16, (4, 4), file)], read_model_config(checkpoints.config()))
    assert [t.name for u in grouping.extra for t in u.tensors.values()] == [name]


@pytest.mark.parametrize(
    "parameter",
    [
        "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point",
        "weight_shape", "weight_g_idx", "scale", "scales", "qzeros", "g_idx", "qscale_weight", "qscale_act",
        "input_scale",
        "input_zero_point", "activation_scale",
    ],
)  # fmt: skip
def test_what_is_stored_for_a_weight_joins_it(parameter):
    for carrier in CARRIERS:
        stem = "model.layers.1.self_attn.q_proj"
        made = [TensorSpec(n, BF16, (4, 4)) for n in checkpoints.tensors() if stem not in n]
        made += [TensorSpec(f"{stem}.{p}", BF16, (4, 4)) for p in (parameter, carrier)]
        units = units_of(made, read_model_config(checkpoints.config())).others
        (unit,) = [u for u in units if stem in u.name]
        assert list(unit.tensors) == [carrier, parameter] and unit.layer == 1


@pytest.mark.parametrize("parameter", ["bias", "e_score_correction_bias", "A_log"])
def test_what_is_no_part_of_a_weight_stays_alone(parameter):
    stem = "model.layers.1.mlp.gate"
    made = [TensorSpec(n, BF16, (4, 4)) for n in [*checkpoints.tensors(), f"{stem}.{parameter}"]]
    units = [u for u in units_of(made, read_model_config(checkpoints.config())).others if u.name.startswith(stem)]
    assert [list(u.tensors) for u in units] == [["weight"], [parameter]]
