"""config.json and the files beside it say how the output is quantised: as before, or not at all, or it is refused."""

import json

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import (
    AutoLoader,
    Awq,
    CompressedTensorsFormat,
    Fp4,
    Fp8,
    Gptq,
    Int4,
    KtAmx,
    MoeToBf16,
    SafetensorsWriter,
)

from ktforge import Pipeline
from ktforge.testing import MemoryLoader, MemoryWriter

QUERY = "model.layers.0.self_attn.q_proj"
MIXED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def mixed(**change):
    """FP8 experts, and one attention weight in AWQ."""
    data = {}
    for i, (name, array) in enumerate(checkpoints.tensors().items()):
        if ".experts." in name:
            data[name], data[name + "_scale_inv"] = checkpoints.to_fp8(array, (128, 128), i)
        elif not name.startswith(QUERY):
            data[name] = array
    words = {"qweight": np.zeros((256, 32), np.int32), "qzeros": np.zeros((8, 32), np.int32)}
    data |= {f"{QUERY}.{p}": a for p, a in words.items()} | {f"{QUERY}.scales": np.ones((8, 256), np.float16)}
    return MemoryLoader(tensors=data | change, model=checkpoints.config(quantization_config=MIXED))


@pytest.mark.parametrize("stage", [Fp8, Gptq, Fp4, CompressedTensorsFormat])
def test_what_stays_quantised_would_not_be_explained(stage):
    (problem,) = Pipeline(loader=mixed(), preprocess=[stage()], writer=MemoryWriter()).plan().problems
    left = f"{QUERY}.qweight (I32 [256, 32])" if stage is Fp8 else "model.layers.0"
    assert left in problem and "would stay quantised, without the quantization_config of config.json" in problem
    if stage is Fp8:
        assert f"with {QUERY}.qzeros and {QUERY}.scales beside it" in problem
    assert problem.endswith("add the preprocessor of its format, or moe-to-bf16 for a MoE model")


@pytest.mark.parametrize("stages", [[Fp8(), Awq()], [Awq(), Fp8()], [MoeToBf16()]])
def test_nothing_is_left_to_explain(stages):
    planned = Pipeline(loader=mixed(), preprocess=stages, writer=MemoryWriter()).plan()
    assert planned.problems == () and json.loads(planned.config_json) == checkpoints.config()


def test_what_a_layout_leaves_out_needs_no_explanation():
    layout = KtAmx(threadpool_count=1, non_experts="omit")
    pipeline = Pipeline(loader=mixed(), preprocess=[Fp8()], quantize=Int4(), layout=layout, writer=MemoryWriter())
    assert pipeline.plan().problems == ()


def test_tables_of_a_model_are_no_weights():
    loader = mixed(
        **{"model.embed_positions.ids": np.zeros((2, 3), np.int64), "model.mask": np.zeros((2, 2), np.bool_)}
    )
    planned = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan()
    assert planned.problems == ()


@pytest.mark.parametrize("inside", [True, False])
def test_files_that_describe_a_quantisation_go_with_it(tmp_path, out, inside):
    """Model Optimizer's stands for what config.json does not say, and readers believe it."""
    folder = checkpoints.fp8_checkpoint(tmp_path / "model", (128, 128))
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    if inside:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    names = {"hf_quant_config.json", "quantize_config.json"}
    for name in names:
        (folder / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}} | quantization))
    Pipeline(loader=AutoLoader(path=folder), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=out)).run()
    assert not names & {p.name for p in out.iterdir()}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    copy = tmp_path / "copy"
    Pipeline(loader=AutoLoader(path=folder), writer=SafetensorsWriter(path=copy)).run()
    assert names < {p.name for p in copy.iterdir()}
    assert (copy / "config.json").read_bytes() == (folder / "config.json").read_bytes()
