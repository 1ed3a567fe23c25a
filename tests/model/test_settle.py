"""Fields that config.json lacks, and what the tensors say instead; a MoE model is never taken for a dense one."""

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16, EXPERTS, HIDDEN, LAYERS, SIZE
from conversions import model
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, KtAmx, SafetensorsWriter, SplitExperts

from ktforge import CheckpointError, Pipeline
from ktforge.contract.rules import Rule
from ktforge.model.settle import ROUTER, settled
from ktforge.testing import MemoryLoader, MemoryWriter

WHAT_IT_LACKS = ("num_experts", "moe_intermediate_size", "hidden_size", "num_hidden_layers", "decoder_sparse_step")


def config(*lacking, **changes):
    return {k: v for k, v in checkpoints.config(**changes).items() if k not in lacking and v is not None}


def specs(data):
    return tuple(MemoryLoader(tensors=data, model={}).scan())


def planned(data, said, *preprocess, rules=()):
    loader = MemoryLoader(tensors=data, model=said)
    stages = {"preprocess": preprocess, "quantize": Int4(group_size=32), "layout": CompressedTensors(), "rules": rules}
    return Pipeline(loader=loader, writer=MemoryWriter(), **stages).plan()


def dense_first(data):
    """The first layer has a dense MLP, as DeepSeek's."""
    made = {n: a for n, a in data.items() if not n.startswith("model.layers.0.mlp.")}
    return {**made, "model.layers.0.mlp.gate_proj.weight": np.zeros((SIZE, HIDDEN), BF16)}


@pytest.mark.parametrize("lacking", [*[(name,) for name in WHAT_IT_LACKS], WHAT_IT_LACKS])
@pytest.mark.parametrize("make", ["alone", "fused", "transposed", "wrapped", "without model."])
def test_the_tensors_say_what_config_json_does_not(lacking, make):
    data = checkpoints.tensors()
    if make in ("fused", "transposed"):
        data = checkpoints.fuse(data, transposed=make == "transposed")
    if make == "wrapped":
        data = {n.replace("model.", "model.language_model.", 1): a for n, a in data.items()}
    if make == "without model.":
        data = {n.removeprefix("model."): a for n, a in data.items()}
    plan = planned(data, config(*lacking), SplitExperts())
    assert plan.problems == ()
    assert (plan.model.experts, plan.model.expert_size, plan.model.hidden) == (EXPERTS, SIZE, HIDDEN)
    assert plan.model.moe_layers == set(range(LAYERS))
    assert sorted(note.split()[3].strip(":") for note in plan.notes) == sorted(set(lacking) & set(WHAT_IT_LACKS[:4]))


def test_layers_without_experts_and_router_are_dense_where_no_field_says_which():
    plan = planned(dense_first(checkpoints.tensors()), config("decoder_sparse_step", "mlp_only_layers"))
    assert plan.problems == () and plan.model.moe_layers == {1}
    assert plan.notes == ["config.json has no moe_layers: the tensors say [1]"]


def test_a_layer_that_lost_its_experts_is_not_taken_for_a_dense_one():
    lost = {n: a for n, a in checkpoints.tensors().items() if "layers.0.mlp.experts." not in n}
    plan = planned(lost, config("decoder_sparse_step", "mlp_only_layers"))
    assert plan.problems == ("layer 0: config.json announces 4 experts here, the checkpoint has none",)


@pytest.mark.parametrize("words", [("gate", "up", "down"), ("w1", "w3", "w2")])
def test_experts_under_names_of_a_family_that_no_file_knows(words):
    new = dict(zip(checkpoints.PROJECTIONS.values(), words, strict=True))
    data = {}
    for name, array in checkpoints.tensors().items():
        for theirs, ours in new.items():
            name = name.replace(f".{theirs}.", f".{ours}.") if ".experts." in name else name
        data[name.replace(".mlp.", ".sparse_block.")] = array
    said = config("num_experts", model_type="smallthinker", moe_num_primary_experts=None)
    plan = planned(data, said)
    assert plan.problems == () and plan.expert_units == LAYERS * EXPERTS
    assert plan.notes == ["config.json has no num_experts: the tensors say 4"]
    experts = [u for u in plan.units if u.source.is_expert]
    assert all(u.results[0][0].quant is not None for u in experts)


@pytest.mark.parametrize("count", ["moe_num_primary_experts", "num_local_experts"])
def test_more_names_of_the_count(count):
    plan = planned(checkpoints.tensors(), config("num_experts", **{count: EXPERTS}))
    assert plan.problems == () and not plan.notes


ROUTERS = [
    "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.router.weight", "model.layers.0.mlp.router.gate.weight",
    "model.layers.0.mlp.gate.wg.weight", "model.layers.0.block_sparse_moe.primary_router.weight",
    "model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.router.layer.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dense", [False, True])
def test_a_router_is_never_quantised(name, dense):
    said = config("num_experts") if dense else config()
    data = {n: a for n, a in checkpoints.tensors().items() if not (".mlp." in n and dense)}
    data = {n: a for n, a in data.items() if n != ROUTERS[0]} | {name: np.zeros((EXPERTS, HIDDEN), BF16)}
    rules = (Rule(match="re:.*(q_proj|gate|router).*", quantizer=Int4(group_size=32)),)
    for plan in (planned(data, said), planned(data, said, rules=rules)):
        assert plan.problems == ()
        (router,) = [u for u in plan.units if u.source.name == name]
        assert router.results[0][0].quant is None
        assert any(u.results[0][0].quant is not None for u in plan.units if ROUTER.search(u.source.name) is None)


def test_packed_experts_whose_size_nothing_tells_are_refused_with_the_field():
    data = {
        (n + "_packed" if ".experts." in n else n): (
            np.zeros((a.shape[0], a.shape[1] // 8), np.int32) if ".exp" in n else a
        )
        for n, a in checkpoints.tensors().items()
    }
    assert "hidden_size" not in settled(config("hidden_size"), specs(data))
    with pytest.raises(CheckpointError, match='tensors do not tell: add "hidden_size"'):
        planned(data, config("hidden_size"))


def test_a_vision_tower_keeps_the_name_of_its_layers(tmp_path):
    source = model(tmp_path / "source", 1, 2, 256, 256)
    data = checkpoints.load_output(source) | {"vision_model.layers.5.x.weight": np.ones((4, 4), BF16)}
    data |= {"model.vision_model.layers.5.y.weight": np.ones((4, 4), BF16)}
    source = checkpoints.write(
        tmp_path / "wrapped",
        data,
        config(num_experts=2, num_hidden_layers=1, moe_intermediate_size=256, hidden_size=256),
    )
    Pipeline(
        loader=AutoLoader(path=source), quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=tmp_path / "out")
    ).run()
    names = checkpoints.load_output(tmp_path / "out").keys()
    assert {"vision_model.layers.5.x.weight", "vision_model.layers.5.y.weight", "norm.weight"} <= names


def test_experts_without_gates_are_refused_for_that():
    data = {n.replace("model.", "backbone.").replace(".mlp.", ".mixer."): a for n, a in checkpoints.tensors().items()}
    data = {n: a for n, a in data.items() if ".gate_proj." not in n}
    (problem,) = planned(data, config(model_type="nemotron_h")).problems
    assert problem.startswith("backbone.layers.0.mixer.experts.0 (and 7 more): has up and down but no gate projection")


@pytest.mark.parametrize("size", [[SIZE, SIZE], [SIZE]])
def test_a_list_of_equal_numbers_is_that_number(size):
    plan = planned(checkpoints.tensors(), config(moe_intermediate_size=size))
    assert plan.problems == () and plan.model.expert_size == SIZE


def test_a_wrapper_in_a_wrapper():
    data = {f"thinker.{n}": a for n, a in checkpoints.tensors().items()}
    said = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": config()}}
    plan = planned(data, said)
    assert plan.problems == () and plan.expert_units == LAYERS * EXPERTS


def test_layers_with_experts_that_are_chosen_by_hash():
    plan = planned(checkpoints.tensors(), config(mlp_layer_types=["hash_moe", "sparse"]))
    assert plan.problems == ()
