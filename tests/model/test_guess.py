"""Problems of config.json, of the tensors, and of every stage come out together."""

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SplitExperts

from ktforge import CheckpointError, Pipeline
from ktforge.model.config import EXPERT_SIZE
from ktforge.testing import MemoryLoader, MemoryWriter

BROKEN = {
    n: a for n, a in checkpoints.tensors().items()
    if "layers.0.mlp.experts.3." not in n and "layers.1.mlp.experts.2.up" not in n
}  # fmt: skip
NO_UP = "model.layers.1.mlp.experts.2: has no up projection"
NO_EXPERT = "layer 0: expert 3 missing; config.json announces 4"
NOT_TOLD = (
    'config.json has no {0}, nor one of its other names ({1}), and the tensors do not tell: add "{0}" to config.json'
)
NO_EXPERT_OF = "layer 0: expert 3 missing; the names speak of 4"


def problems(data, model, **stages):
    loader = MemoryLoader(tensors=data, model={k: v for k, v in model.items() if v is not None})
    try:
        return Pipeline(loader=loader, writer=MemoryWriter(), **stages).plan().problems
    except CheckpointError as error:
        return error.problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": "wide"}, "config.json: hidden_size is 'wide'; it must be a whole number"),
        ({"num_hidden_layers": "two"}, "config.json: num_hidden_layers is 'two'; it must be a whole number"),
        ({"num_local_experts": 16}, "config.json: num_experts is 4 but num_local_experts is 16: remove the wrong one"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_config_that_cannot_be_used_hides_nothing(change, problem, nested):
    model = {k: v for k, v in checkpoints.config(**change).items() if v is not None}
    first, *rest = problems(BROKEN, {"text_config": model} if nested else model)
    assert first.startswith(problem) and rest == [NO_UP, NO_EXPERT_OF if "num_local_experts" in change else NO_EXPERT]


@pytest.mark.parametrize("fused", [False, True])
def test_experts_that_config_json_does_not_know_are_no_dense_model(fused):
    data = checkpoints.fuse(checkpoints.tensors()) if fused else BROKEN
    found = problems(data, checkpoints.config(num_experts=None), preprocess=[MoeToBf16()])
    if fused:
        assert found == ()  # the tensors say 4
    else:
        assert found[0].startswith("config.json has no num_experts or n_routed_experts")
        assert found[1:] == (NO_UP, NO_EXPERT_OF)


def test_experts_that_nothing_counts_are_no_dense_model():
    fewer = {n: a for n, a in checkpoints.tensors().items() if "layers.0.mlp.experts.3." not in n}
    for data in (fewer, {n.replace("layers", "blocks"): a for n, a in checkpoints.tensors().items()}):
        first, *_ = problems(data, checkpoints.config(num_experts=None), preprocess=[MoeToBf16()])
        assert first.startswith("config.json has no num_experts or n_routed_experts")
        assert first.endswith('do not tell how many a layer has: add "num_experts" to config.json')


def test_names_that_no_file_knows_are_left_to_the_config():
    assert problems({"a.weight": np.zeros(3)}, {"num_experts": 4}) == (
        NOT_TOLD.format("num_hidden_layers", "num_layers"),
        NOT_TOLD.format("hidden_size", "d_model"),
        NOT_TOLD.format("moe_intermediate_size", ", ".join(EXPERT_SIZE[1:])),
    )  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
def test_a_stage_that_refuses_hides_no_other(fused):
    data = checkpoints.tensors()
    data = checkpoints.fuse(data) if fused else data
    data = {n: a.astype(np.float64) if ".experts" in n else a for n, a in data.items()}
    stages = {"preprocess": [SplitExperts(), MoeToBf16()], "quantize": Int4(), "layout": KtAmx(threadpool_count=3)}
    stored, count = problems(data, checkpoints.config(), **stages)
    assert "gate, up, down are stored as F64, which moe-to-bf16 does not read" in stored
    assert "threadpool_count 3 does not split expert size 512 into multiples of 128" in count
    assert stored.split(":")[0] == count.split(":")[0]


def test_a_layout_says_all_that_does_not_fit():
    size = checkpoints.SIZE
    data = {
        n: a[:, :200] if "gate" in n or "up" in n else a[:200] for n, a in checkpoints.tensors().items() if ".exp" in n
    }
    model = checkpoints.config(hidden_size=200)
    hidden, count = problems(data, model, quantize=Int4(), layout=KtAmx(threadpool_count=3))
    assert "hidden size 200 is not a multiple of 128" in hidden and f"does not split expert size {size}" in count


@pytest.mark.parametrize("experts", [None, 4])
def test_an_empty_tensor_may_claim_any_number_of_experts(experts):
    data = {
        f"model.layers.{layer}.mlp.experts.{p}": np.zeros((10**15, 0, 8), checkpoints.BF16)
        for layer in (0, 1) for p in ("gate_up_proj", "down_proj")
    }  # fmt: skip
    found = problems(data, checkpoints.config(num_experts=experts), preprocess=[SplitExperts()])
    assert any("has experts 4, 5, 6, 7, 8 and" in p or "config.json has no num_experts" in p for p in found)
