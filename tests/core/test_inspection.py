import json

import checkpoints
import numpy as np
import pytest
from typer.testing import CliRunner

from ktforge import CheckpointError, Registry
from ktforge.cli import app
from ktforge.config import load_pipeline
from ktforge.inspection import TARGETS, inspect, starter

NONE = dict.fromkeys(TARGETS, ())


@pytest.fixture(scope="module")
def registry():
    return Registry.installed()


def test_a_bf16_checkpoint(source, registry):
    seen = inspect(source, registry)
    assert (seen.model_type, seen.layers, seen.moe_layers, seen.experts) == ("qwen3_moe", 2, (0, 1), 4)
    assert (seen.hidden_size, seen.expert_size, seen.fused) == (256, 512, False)
    assert seen.expert_storage == {"weight BF16": 24} and seen.other_storage == {"weight BF16": 21}
    data = checkpoints.tensors()
    assert seen.expert_bytes == sum(a.nbytes for n, a in data.items() if ".experts." in n)
    assert seen.expert_bytes + seen.other_bytes == sum(a.nbytes for a in data.values())
    assert seen.tensors == len(data) and len(seen.files) == 2 and seen.mtp_bytes == 0
    assert seen.targets == NONE and seen.problems == () and seen.threadpool_count == 2


def test_a_quantised_one_with_prediction_heads_and_copies(tmp_path, registry):
    folder = checkpoints.fp8_checkpoint(tmp_path, (128, 128))
    checkpoints.save_file({"mtp.norm.weight": np.ones(4, np.float32)}, folder / "mtp.safetensors")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    seen = inspect(folder, registry)
    assert seen.expert_storage == {"weight F8_E4M3": 24, "weight_scale_inv F32": 24}
    assert seen.quantization == {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert seen.mtp_bytes == 16 and seen.not_read == ("original/consolidated.00.pth",)
    assert seen.targets == NONE and seen.problems == ()


def test_what_is_wrong_is_said_once(tmp_path, registry):
    data = checkpoints.tensors()
    for expert in (1, 2):
        name = checkpoints.expert_name(1, expert, "gate")
        data[name] = data[name].astype(np.float64)
    folder = checkpoints.write(tmp_path, data, checkpoints.config(num_experts=5))
    seen = inspect(folder, registry)
    assert seen.targets == NONE
    stem = "model.layers.1.mlp.experts.1"
    assert seen.problems == (
        "layer 0: expert 4 missing; config.json announces 5",
        "layer 1: expert 4 missing; config.json announces 5",
        f"{stem} (and 1 more): gate is stored as F64, which moe-to-bf16 does not read; it knows BF16, FP16, FP32, fp8, "
        "fp4, compressed-tensors, gptq, awq: get a copy in one of them",
    )


def test_what_cannot_be_made_says_why(tmp_path, registry):
    data = checkpoints.fuse(checkpoints.tensors(), transposed=True, interleaved=True, biases=True)
    folder = checkpoints.write(tmp_path / "model", data, checkpoints.config(model_type="gpt_oss"))
    seen = inspect(folder, registry)
    assert seen.fused and seen.problems == () and seen.threadpool_count is None
    assert seen.targets["moe-to-bf16"] == ()
    (reason,) = seen.targets["convert --quant-method int8"]
    assert reason == (
        "model.layers.0.mlp.experts (and 1 more): kt-amx has no place for the biases of gate, up, down: "
        "`ktforge moe-to-bf16` keeps them"
    )
    made = runs(starter(folder, registry), tmp_path, registry)
    assert made.layout is None and "# No quantize and layout: " in starter(folder, registry)


def runs(text, tmp_path, registry):
    """The pipeline of a file, which can be planned as it is."""
    (tmp_path / "pipeline.yaml").write_text(text)
    pipeline = load_pipeline(tmp_path / "pipeline.yaml", registry, [f"writer.path={tmp_path / 'out'}"])
    assert pipeline.plan().problems == ()
    return pipeline


@pytest.mark.parametrize("fused", [False, True])
def test_a_starter_runs_as_it_is(tmp_path, registry, fused):
    data = checkpoints.fuse(checkpoints.tensors()) if fused else checkpoints.tensors()
    model = checkpoints.config(model_type="qwen3_5_moe_text" if fused else "qwen3_moe")
    folder = checkpoints.write(tmp_path / "it's: a {folder}", data, model)
    pipeline = runs(starter(folder, registry), tmp_path, registry)
    assert [s.name for s in pipeline.preprocess] == [*["split-experts"] * fused, "moe-to-bf16"]
    assert pipeline.layout.threadpool_count == 2


def test_a_starter_picks_a_count_that_fits(tmp_path, registry):
    shapes = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
    data = {
        checkpoints.expert_name(layer, e, p): np.zeros(shapes[p], checkpoints.BF16)
        for layer in (0, 1) for e in range(4) for p in shapes
    }  # fmt: skip
    folder = checkpoints.write(tmp_path / "m", data, checkpoints.config(moe_intermediate_size=128))
    assert runs(starter(folder, registry), tmp_path, registry).layout.threadpool_count == 1


def test_the_commands(source, tmp_path):
    shown = CliRunner().invoke(app, ["inspect", str(source)])
    assert shown.exit_code == 0 and "qwen3_moe, 2 layers, 2 with experts" in shown.stdout
    as_json = CliRunner().invoke(app, ["inspect", str(source), "--json"])
    assert json.loads(as_json.stdout)["experts"] == 4
    made = CliRunner().invoke(app, ["init", str(source)])
    assert made.exit_code == 0 and made.stdout == starter(source, Registry.installed())
    missing = CliRunner().invoke(app, ["inspect", str(tmp_path / "none")])
    assert isinstance(missing.exception, CheckpointError)
