"""Multi-token-prediction layers are kept whole or left out whole, and config.json says which."""

import json

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, KtAmx, MoeToBf16

from ktforge import Pipeline
from ktforge.testing import MemoryLoader, MemoryWriter

STEM = {"beyond": "model.layers.2.", "named": "mtp.layers.0."}


def heads(kind="beyond", number=2):
    """A whole layer of the model once more, and what only these layers have."""
    stem = STEM[kind].replace("2", str(number))
    made = {n.replace("model.layers.1.", stem): a for n, a in checkpoints.tensors().items() if "layers.1." in n}
    return made | {f"{stem}eh_proj.weight": np.ones((256, 512), checkpoints.BF16)}


def plan(extra, mtp="keep", layout=False, **config):
    stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=1)} if layout else {"preprocess": [MoeToBf16()]}
    loader = MemoryLoader(tensors={**checkpoints.tensors(), **extra}, model=checkpoints.config(**config))
    return Pipeline(loader=loader, writer=MemoryWriter(), mtp=mtp, **stages).plan()


def without(extra, *parts):
    return {n: a for n, a in extra.items() if not any(p in n for p in parts)}


MEND = ": get the rest, or leave these layers out with mtp: omit in a pipeline file"
EXPERTS = {"beyond": "model.layers.2.mlp.experts", "named": "mtp.layers.0.mlp.experts"}


@pytest.mark.parametrize("kind", STEM)
@pytest.mark.parametrize("layout", [False, True])
@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([".experts.3."], ", for multi-token prediction: expert 3 missing"),
        ([".experts.1.up_proj"], ".1, for multi-token prediction: has no up_proj"),
        (
            [".experts.1.up_proj", ".experts.2.up_proj", ".experts.2.down_proj"],
            ".1 (and 1 more), for multi-token prediction: has no up_proj",
        ),
        ([".up_proj"], ", for multi-token prediction: have down_proj and gate_proj only"),
    ],
)
def test_half_an_expert_is_refused_where_it_is_to_be_kept(kind, layout, parts, problem):
    extra = without(heads(kind), *parts)
    assert EXPERTS[kind] + problem + MEND in plan(extra, layout=layout).problems
    assert plan(extra, "omit", layout).problems == ()


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (["self_attn"], "has experts but no self_attn.k_norm.weight, self_attn.k_proj.weight, "),
        (["mlp.gate."], "has experts but no mlp.gate.weight, as the model's own layers do"),
        ([".experts."], "has a router but no experts"),
    ],
)  # fmt: skip
def test_half_a_layer_is_refused_where_it_is_to_be_kept(parts, problem):
    (found,) = plan(without(heads(), *parts)).problems
    assert found.startswith(f"layer 2, for multi-token prediction: {problem}") and found.endswith(MEND)


def test_a_layer_that_config_json_counts_must_be_there():
    (problem,) = plan(heads(number=3), num_nextn_predict_layers=2).problems
    assert problem == (
        "layer 2, for multi-token prediction: is missing, while layer 3 is there and config.json counts 2" + MEND
    )
    assert plan({}, num_nextn_predict_layers=2).problems == ()  # none at all is whole


@pytest.mark.parametrize("extra", [heads(), heads("named"), without(heads(), ".mlp.")], ids=["whole", "named", "dense"])
def test_whole_layers_are_kept(extra):
    planned = plan(extra, num_nextn_predict_layers=1)
    assert planned.problems == () and planned.left_out == ()
    assert json.loads(planned.config_json)["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("kind", STEM)
def test_fused_experts_of_a_layer_must_be_whole(kind):
    fused = checkpoints.fuse(checkpoints.tensors())
    extra = {n.replace("model.layers.1.", STEM[kind]): a for n, a in fused.items() if "layers.1." in n}
    loader = MemoryLoader(tensors={**fused, **without(extra, "down_proj")}, model=checkpoints.config())
    (problem,) = Pipeline(loader=loader, writer=MemoryWriter()).plan().problems
    assert problem == f"{EXPERTS[kind]}, for multi-token prediction: has gate_up only{MEND}"
    extra = {n: a[:3] if ".experts." in n else a for n, a in extra.items()}
    loader = MemoryLoader(tensors={**fused, **extra}, model=checkpoints.config())
    (problem,) = Pipeline(loader=loader, writer=MemoryWriter()).plan().problems
    assert problem == f"{EXPERTS[kind]}, for multi-token prediction: has 3 of 4 experts{MEND}"


def without_packing(config, layout):
    """config.json without what kt-amx says of itself."""
    said = {key: config.pop(key, None) for key in ("quantization_config", "amx_quantization")}
    assert all(said.values()) if layout else not any(said.values())
    return config


@pytest.mark.parametrize("layout", [False, True])
@pytest.mark.parametrize(
    "field", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"]
)
def test_config_json_counts_no_layer_that_was_left_out(field, layout):
    made = json.loads(plan(heads(), "omit", layout, **{field: 1, "layer_types": ["full", "full", "mtp"]}).config_json)
    assert without_packing(made, layout) == checkpoints.config(**{field: 0, "layer_types": ["full", "full"]})
    nested = {"text_config": {field: 1, "rope_theta": [1e4, 1e4, 1e5]}}
    made = json.loads(plan(heads(), "omit", layout, **nested).config_json)
    assert made["text_config"] == {field: 0, "rope_theta": [1e4, 1e4]}


def test_a_list_that_happens_to_be_as_long_is_not_cut():
    config = {"num_nextn_predict_layers": 1, "swiglu_limits": [0.0, 7.0, 0.0], "eos_token_id": [1, 2, 3]}
    made = json.loads(plan(heads(), "omit", **config).config_json)
    assert made["eos_token_id"] == [1, 2, 3] and made["swiglu_limits"] == [0.0, 7.0]


def test_config_json_is_left_alone_where_no_such_layer_was():
    config = {"num_nextn_predict_layers": 1, "layer_types": ["full", "full", "mtp"]}
    assert json.loads(plan({}, "omit", **config).config_json) == checkpoints.config(**config)


def test_a_number_that_no_model_has_is_none():
    assert plan(heads(), num_nextn_predict_layers=10**15, text_config=[1]).problems == ()


@pytest.mark.parametrize("kind", STEM)
@pytest.mark.parametrize("fused", [False, True])
def test_experts_of_a_layer_become_bf16_like_the_models_own(kind, fused):
    own = checkpoints.tensors()
    data = own | heads(kind)
    if fused:
        data = checkpoints.fuse(own)
        data |= {n.replace("model.layers.1.", STEM[kind]): a for n, a in data.items() if "layers.1." in n}
    data = {n: a.astype(np.float32) if ".experts." in n else a for n, a in data.items()}
    loader = MemoryLoader(tensors=data, model=checkpoints.config())
    planned = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan()
    assert planned.problems == ()
    made = {t.name: t.dtype for u in planned.units for t in u.outputs}
    assert made.keys() == data.keys() and set(made.values()) == {checkpoints.BF16}


def test_fp8_experts_of_a_fused_layer_become_bf16():
    own, data = checkpoints.fuse(checkpoints.tensors()), {}
    own |= {n.replace("model.layers.1.", STEM["named"]): a for n, a in own.items() if "layers.1." in n}
    for name, array in own.items():
        data[name] = array.astype(checkpoints.F8) if ".experts." in name else array
        if ".experts." in name:
            shape = (len(array), array.shape[1] // 128, array.shape[2] // 128)
            data[name + "_scale_inv"] = np.ones(shape, np.float32)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    loader = MemoryLoader(tensors=data, model=checkpoints.config(quantization_config=quantization))
    planned = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan()
    assert planned.problems == ()
    made = {t.name: (t.dtype, t.shape) for u in planned.units for t in u.outputs}
    assert made == {n: (checkpoints.BF16, a.shape) for n, a in own.items()}
