"""compressed-tensors folders in transformers: they load, generate, and compute what the dequantised weights do."""

import json

import checkpoints
import numpy as np
import pytest
import torch
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, Int8, SafetensorsWriter
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from ktforge import Pipeline, Registry
from ktforge.pipeline.presets import dequantize_pipeline

pytestmark = pytest.mark.runtime
TOKENS = torch.arange(24).reshape(2, 12) % checkpoints.VOCAB


def qwen2(folder):
    """A tiny dense Qwen2."""
    random = np.random.default_rng(0)
    model, keys = checkpoints.architectures()["qwen2"]
    model = {
        **model, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    model.pop("num_experts", None)
    data = {
        name: np.ones(shape, checkpoints.BF16) if "norm" in name
        else (random.standard_normal(shape, np.float32) * 0.05).astype(checkpoints.BF16)
        for name, (_, shape) in keys.items()
    }  # fmt: skip
    return checkpoints.write(folder, data, model)


def load(folder, **options):
    """The model, its loading checked."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


INT4, ASYMMETRIC = Int4(group_size=32), Int4(group_size=32, symmetric=False)
#: What transformers 5.24 with compressed-tensors 0.20 loads: see docs/readers.md for what it does not.
CASES = [
    ("qwen2", INT4, "pack-quantized", False),
    ("qwen2", Int8(group_size=64), "pack-quantized", False),
    ("qwen2", Int8(), "int-quantized", False),
    ("qwen2", ASYMMETRIC, "pack-quantized", True),
    ("qwen3_moe", INT4, "pack-quantized", False),
    ("qwen3_moe", Int8(group_size=64), "pack-quantized", False),
]


@pytest.mark.parametrize(("kind", "quantizer", "form", "ahead"), CASES)
def test_transformers(tmp_path, source, kind, quantizer, form, ahead):
    source = qwen2(tmp_path / "qwen2") if kind == "qwen2" else source
    packed, back = tmp_path / "packed", tmp_path / "back"
    Pipeline(
        loader=AutoLoader(path=source), quantize=quantizer, layout=CompressedTensors(format=form),
        writer=SafetensorsWriter(path=packed),
    ).run()  # fmt: skip
    assert "quantization_config" in json.loads((packed / "config.json").read_text())
    dequantize_pipeline(packed, back, Registry.installed()).run()
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if ahead else {}
    quantised, plain = load(packed, dtype=torch.float32, **options), load(back, dtype=torch.float32)
    generated = quantised.generate(TOKENS[:1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)
    with torch.no_grad():
        got, want = quantised(TOKENS).logits.float(), plain(TOKENS).logits
    error = (got - want).norm() / want.norm()
    print(f"{kind} {quantizer.name} {form}: relative error of the logits {error:.5f}")
    assert error < 0.02
