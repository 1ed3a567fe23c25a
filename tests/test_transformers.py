"""What moe-to-bf16 writes on its own is an ordinary checkpoint: transformers loads it and computes the same. What
kt-amx writes is none, and transformers says so."""

import json

import checkpoints
import numpy as np
import pytest
import torch
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, MoeToBf16, SafetensorsWriter
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

from ktforge import Pipeline, Registry
from ktforge.inspection.description import describe
from ktforge.inspection.look import Look
from ktforge.pipeline.presets import dequantize_pipeline

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


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("non_experts", ["rename", "keep", "omit"])
@pytest.mark.parametrize(("quantizer", "method"), [(Int4(), "int4"), (Int8(), "int8")])
def test_packed_experts_are_no_model_to_load(source, tmp_path, out, quantizer, method, non_experts, manifest):
    layout = KtAmx(threadpool_count=2, non_experts=non_experts)
    loader, writer = AutoLoader(path=source), SafetensorsWriter(path=out)
    Pipeline(loader=loader, quantize=quantizer, layout=layout, writer=writer).run()
    assert json.loads((out / "config.json").read_text())["amx_quantization"] == {
        "converted": True, "method": method, "numa_count": 2,
    }  # fmt: skip
    for model in (AutoModelForCausalLM, Qwen3MoeForCausalLM):
        with pytest.raises(ValueError, match=r"quantization config .* has no `quant_method`"):
            model.from_pretrained(out)
    assert AutoConfig.from_pretrained(out).model_type == "qwen3_moe", "tokenizers and tools may still read it"

    if not manifest:
        (out / "ktforge_manifest.json").unlink()
    registry = Registry.installed()
    assert describe(Look.at(out, registry)).packed == f"kt-amx-{method}/1"
    back = tmp_path / "back"
    dequantize_pipeline(out, back, registry).run()
    assert json.loads((back / "config.json").read_text()) == checkpoints.config()
    if non_experts != "omit":
        assert logits(back).shape == (2, 12, checkpoints.VOCAB)
