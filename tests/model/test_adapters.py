"""A LoRA adapter is never lost in silence."""

import json

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16
from ktforge_plugins import AutoLoader, Int4, KtAmx, MoeToBf16

from ktforge import CheckpointError, Pipeline
from ktforge.testing import MemoryWriter


def lora():
    return np.zeros((8, 8), BF16)


STEM = "model.layers.1.mlp.experts.2.up_proj"


def plan(folder, **stages):
    return Pipeline(loader=AutoLoader(path=folder), writer=MemoryWriter(), **stages).plan()


INT4 = {"preprocess": [MoeToBf16()], "quantize": Int4(), "layout": KtAmx()}


@pytest.mark.parametrize("stages", [INT4, {"preprocess": [MoeToBf16()]}, {}])
@pytest.mark.parametrize(
    "name",
    [f"{STEM}.lora_A.weight", f"{STEM}.lora_B.default.weight", f"{STEM}.lora_magnitude_vector",
     f"base_model.model.{STEM}.lora_A.weight", "model.layers.0.mlp.experts.lora_A.default.weight",
     "model.layers.0.mlp.experts.gate_up_proj.lora_B.weight", f"{STEM}.base_layer.weight"],
)  # fmt: skip
def test_of_an_expert(tmp_path, name, stages):
    data = checkpoints.tensors() | {name: lora()}
    folder = checkpoints.write(tmp_path / "m", data, checkpoints.config())
    with pytest.raises(CheckpointError) as caught:
        plan(folder, **stages)
    assert str(caught.value) == (
        f"{folder}/model.safetensors: {name} is part of a LoRA adapter for an expert (1 such tensor), which would be "
        "lost: merge the adapter first, with PEFT's merge_and_unload() and save_pretrained()"
    )


def test_of_another_weight(tmp_path):
    names = [f"model.layers.0.{m}.lora_A.weight" for m in ("self_attn.q_proj", "mlp.shared_experts.up_proj")]
    data = checkpoints.tensors() | {n: lora() for n in names}
    folder = checkpoints.write(tmp_path / "m", data, checkpoints.config())
    assert sorted(t.name for t in plan(folder, **INT4).left_out) == sorted(names)
    assert not plan(folder, preprocess=[MoeToBf16()]).left_out, "a BF16 checkpoint keeps all that it had"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "adapter_model-00001-of-00001.safetensors", "adapter_model.bin"]
)
def test_a_file_of_its_own(tmp_path, shards, file):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config(), shards)
    checkpoints.save_file({f"base_model.model.{STEM}.lora_A.weight": lora()}, folder / file)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError) as caught:
        plan(folder, **INT4)
    assert str(caught.value).startswith(f"{folder}/{file} is a LoRA adapter, which would be left out: merge the ad")
    assert len(caught.value.problems) == 1
