"""What moe-to-bf16 writes on its own is an ordinary checkpoint: transformers loads it and computes the same."""

import checkpoints
import numpy as np
import pytest
import torch
from ktforge_plugins import AutoLoader, MoeToBf16, SafetensorsWriter
from transformers import AutoModelForCausalLM

from ktforge import Pipeline

TOKENS = torch.arange(24).reshape(2, 12) % checkpoints.VOCAB


def logits(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert getattr(model.config, "quantization_config", None) is None
    with torch.no_grad():
        return model(TOKENS).logits


def test_an_fp8_checkpoint_becomes_one_that_transformers_loads(tmp_path, out):
    source = checkpoints.fp8_checkpoint(tmp_path / "fp8", (128, 128), attention=True)
    writer = SafetensorsWriter(path=out, max_shard_size="1MB")
    Pipeline(loader=AutoLoader(path=source), preprocess=[MoeToBf16()], writer=writer).run()
    assert len(list(out.glob("*.safetensors"))) > 1

    plain = {}
    for name, array in checkpoints.load_output(source).items():
        if name.endswith("_scale_inv"):
            continue
        if array.dtype == checkpoints.F8:
            scale = checkpoints.load_output(source)[name + "_scale_inv"]
            spread = checkpoints.spread(scale, (128, 128), array.shape)
            array = (array.astype(np.float32) * spread).astype(checkpoints.BF16)
        plain[name] = array
    expected = logits(checkpoints.write(tmp_path / "plain", plain, checkpoints.config()))
    assert torch.equal(logits(out), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_experts_of_another_float_type(tmp_path, out, dtype):
    data = {n: a.astype(dtype) if ".experts." in n else a for n, a in checkpoints.tensors().items()}
    source = checkpoints.write(tmp_path / "source", data, checkpoints.config())
    Pipeline(loader=AutoLoader(path=source), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=out)).run()
    assert torch.equal(logits(out), logits(source))
