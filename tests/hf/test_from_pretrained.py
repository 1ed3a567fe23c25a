"""A converted checkpoint in transformers: the model that the dequantised one is, to float32 rounding."""

import shutil

import checkpoints
import pytest
import torch
import transformers
from families.tiny import tiny_model
from hf.conftest import LAYOUTS, dequantised, plain

from ktforge import CheckpointError, ConfigError, hf
from ktforge.hf.loading import experts_modules

#: Of sums in another order.
ROUNDING = 1e-5


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def assert_alike(mine, theirs):
    assert float((mine - theirs).abs().max()) <= ROUNDING * float(theirs.abs().max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_logits_are_those_of_the_dequantised_checkpoint(converted, tmp_path, ids, name):
    model = hf.from_pretrained(converted[name], dtype=torch.float32)
    assert_alike(logits(model, ids), logits(plain(dequantised(converted[name], tmp_path / "back")), ids))


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "deepseek_v3", "aria_text", "qwen3_next", "gemma4"])
@pytest.mark.parametrize("original_format", [True, False], ids=["as published", "as in memory"])
def test_families(tmp_path, ids, family, original_format):
    tiny_model(family).save_pretrained(tmp_path / "source", save_original_format=original_format)
    whole = transformers.AutoModelForImageTextToText if family == "gemma4" else transformers.AutoModelForCausalLM
    theirs = whole.from_pretrained(tmp_path / "source", dtype=torch.float32, experts_implementation="eager")
    mine = hf.from_pretrained(tmp_path / "source", dtype=torch.float32)
    assert_alike(logits(mine, ids), logits(theirs, ids))


def test_the_dtype_is_the_checkpoints(converted, ids):
    model = hf.from_pretrained(converted["kt-amx int4"])
    assert model.dtype == torch.bfloat16 and logits(model, ids).dtype == torch.bfloat16


def test_no_expert_is_in_the_model(converted):
    model = hf.from_pretrained(converted["kt-amx int4"])
    held = sum(p.numel() for p in model.parameters())
    assert held == sum(t.size for n, t in checkpoints.tensors().items() if ".experts." not in n)
    assert all(not list(module.parameters()) for _, module in experts_modules(model))


def test_generate(converted, tmp_path, ids):
    theirs = plain(dequantised(converted["kt-amx int4"], tmp_path / "back"))
    mine = hf.from_pretrained(converted["kt-amx int4"], dtype=torch.float32)
    said = [m.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (mine, theirs)]
    assert said[0].shape == (2, 32) and torch.equal(*said)


def test_a_pipeline(converted, original):
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    model = hf.from_pretrained(converted["kt-amx int4"], dtype=torch.float32)
    speaks = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (said,) = speaks("ABC", max_new_tokens=4, do_sample=False)
    new = tokenizer(said["generated_text"].removeprefix("ABC").replace(" ", "")).input_ids
    wanted = model.generate(**tokenizer("ABC", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert new == wanted[0, 3:].tolist()


def test_the_trainer_evaluates(converted, tmp_path, ids):
    model = hf.from_pretrained(converted["kt-amx int4"], dtype=torch.float32)
    theirs = plain(dequantised(converted["kt-amx int4"], tmp_path / "back"))
    examples = [{"input_ids": row, "labels": row} for row in ids]
    options = transformers.TrainingArguments(str(tmp_path / "trainer"), report_to=[], use_cpu=True)
    losses = [transformers.Trainer(m, options, eval_dataset=examples).evaluate()["eval_loss"] for m in (model, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_cache_changes_nothing(converted, ids):
    small, large = (hf.from_pretrained(converted["rawint4"], cache=size, dtype=torch.float32) for size in (0, "1GB"))
    assert torch.equal(logits(small, ids), logits(large, ids))
    assert torch.equal(logits(large, ids), logits(large, ids))


def test_everything_else_comes_from_the_original(converted, original, tmp_path, ids):
    """A ``.kt`` folder has the experts alone."""
    only_experts = converted["kt folder"]
    assert_alike(
        logits(hf.from_pretrained(only_experts, original, dtype=torch.float32), ids),
        logits(hf.from_pretrained(only_experts, dtype=torch.float32), ids),
    )


def test_an_original_that_is_gone(original, tmp_path):
    from hf.conftest import convert

    shutil.copytree(original, tmp_path / "source")
    only_experts = convert(tmp_path / "source", tmp_path / "out", "kt folder")
    for file in only_experts.glob("*.safetensors"):
        file.unlink()
    shutil.rmtree(tmp_path / "source")
    with pytest.raises(CheckpointError, match="say where the original checkpoint is"):
        hf.from_pretrained(only_experts)


def test_another_models_output(converted, tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"was not made of .*other: gate.weight of layer 0 is \[512, 256\] here"):
        hf.from_pretrained(converted["kt-amx int4"], tmp_path / "other")


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_oss", "adds biases in its experts"),
        ("llama4_text", "computes the experts of layer 0 by itself"),
        ("diffusion_gemma", "ties the experts"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, family, why):
    tiny_model(family).save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match=why):
        hf.from_pretrained(tmp_path / "source")


def test_a_model_without_experts(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="holds no routed experts"):
        hf.from_pretrained(tmp_path / "dense")


def test_a_weight_that_is_missing(tmp_path, original, converted):
    data = checkpoints.tensors()
    del data["model.layers.1.self_attn.q_proj.weight"]
    folder = checkpoints.write(tmp_path / "part", data, checkpoints.config(), 1)
    with pytest.raises(CheckpointError, match=r"lacks what transformers needs: model.layers.1.self_attn.q_proj.weight"):
        hf.from_pretrained(folder)


def test_options_that_make_no_sense(converted, original):
    with pytest.raises(ConfigError, match="activations are 'exact' or 'int8', not 'int4'"):
        hf.from_pretrained(converted["bf16"], activations="int4")
    with pytest.raises(ConfigError, match="holds no integer codes"):
        hf.from_pretrained(original, activations="int8")
    with pytest.raises(ConfigError, match="kernels are 'kt-kernel'"):
        hf.from_pretrained(converted["bf16"], kernels="amx")
    with pytest.raises(ConfigError, match="computes with int8 activations anyhow"):
        hf.from_pretrained(converted["kt-amx int4"], kernels="kt-kernel", activations="int8")


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_torch_or_transformers(monkeypatch, missing):
    import importlib

    from ktforge.hf import needs

    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(ConfigError, match=rf"this needs {missing}: pip install 'ktforge\[hf\]'"):
        importlib.reload(needs)


def test_a_transformers_without_the_interface(monkeypatch):
    import importlib

    from ktforge.hf import needs

    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with pytest.raises(ConfigError, match=r"transformers 4\.57\.1 has no interface"):
        importlib.reload(needs)


def test_without_kt_kernel(converted, monkeypatch):
    from ktforge.hf import engine

    monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="kt-kernel is not installed"):
        hf.from_pretrained(converted["kt-amx int4"], kernels="kt-kernel")
    with pytest.raises(ConfigError, match=r"outputs of AMXINT4 and AMXINT8, and .*rawint4 is compressed-"):
        hf.from_pretrained(converted["rawint4"], kernels="kt-kernel")
