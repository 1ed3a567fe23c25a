"""Experts of every float precision become the BF16 that torch makes of them."""

import json

import checkpoints
import forms
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ktforge_plugins import (
    AutoLoader,
    Awq,
    CompressedTensors,
    CompressedTensorsFormat,
    Fp8,
    Gptq,
    Int4,
    MoeToBf16,
    SafetensorsWriter,
    SplitExperts,
)

from ktforge import CheckpointError, Pipeline
from ktforge.testing import MemoryLoader, MemoryWriter


def dequantised(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """(fp8.float() * scale.float()).bfloat16(), by torch."""
    scales = torch.from_numpy(checkpoints.spread(scale, block, weight.shape))
    fp8 = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    return (fp8.float() * scales.float()).bfloat16().view(torch.int16).numpy().view(checkpoints.BF16)


def convert(data, model, **options):
    writer = MemoryWriter()
    loader = MemoryLoader(tensors=data, model=model)
    plan = Pipeline(loader=loader, preprocess=[MoeToBf16(**options)], writer=writer).run().plan
    return writer.tensors, json.loads(plan.config_json)


def equal(got, want):
    assert got.dtype == want.dtype and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_fp16_and_fp32_experts(dtype):
    data = {n: a.astype(np.float32).astype(dtype) * dtype(1.001) for n, a in checkpoints.tensors().items()}
    out, _ = convert(data, checkpoints.config())
    assert out.keys() == data.keys()
    for name, array in data.items():
        if ".experts." in name:
            equal(out[name], torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(checkpoints.BF16))
        else:
            equal(out[name], array)


def fp8_model(size, hidden, block, seed=0, dtype=np.float32):
    model = checkpoints.config(
        moe_intermediate_size=size, hidden_size=hidden, num_hidden_layers=1, num_experts=3,
        quantization_config={"quant_method": "fp8", "weight_block_size": list(block)},
    )  # fmt: skip
    random = np.random.default_rng(seed)
    data = {}
    for expert in range(3):
        for projection in ("gate", "up", "down"):
            shape = (hidden, size) if projection == "down" else (size, hidden)
            name = checkpoints.expert_name(0, expert, projection)
            weight = random.standard_normal(shape, np.float32)
            data[name], scale = checkpoints.to_fp8(weight, block, seed + expert)
            data[name + "_scale_inv"] = scale.astype(dtype)
    return data, model


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 300), hidden=st.integers(1, 300), rows=st.integers(1, 140), cols=st.integers(1, 140),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_fp8_blocks_of_any_size_over_any_shape(size, hidden, rows, cols, seed):
    data, model = fp8_model(size, hidden, (rows, cols), seed)
    out, _ = convert(data, model)
    for name, array in out.items():
        equal(array, dequantised(data[name], data[name + "_scale_inv"], (rows, cols)))
    assert len(out) == 9


def test_bf16_scales():
    data, model = fp8_model(256, 128, (128, 128), dtype=checkpoints.BF16)
    out, _ = convert(data, model)
    name = checkpoints.expert_name(0, 1, "up")
    equal(out[name], dequantised(data[name], data[name + "_scale_inv"].astype(np.float32), (128, 128)))


def test_fp8_outside_the_experts_goes_with_its_config(tmp_path):
    source = checkpoints.fp8_checkpoint(tmp_path / "fp8", (128, 128), attention=True)
    out = tmp_path / "out"
    Pipeline(loader=AutoLoader(path=source), preprocess=[MoeToBf16()], writer=SafetensorsWriter(path=out)).run()
    made, before = checkpoints.load_output(out), checkpoints.load_output(source)
    assert made.keys() == {n for n in before if not n.endswith("_scale_inv")}
    assert {a.dtype for a in made.values()} == {checkpoints.BF16}
    name = "model.layers.1.self_attn.k_proj.weight"
    equal(made[name], dequantised(before[name], before[name + "_scale_inv"], (128, 128)))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_the_quantization_config_of_a_text_config_goes_too():
    data, model = fp8_model(128, 128, (64, 64))
    _, config = convert(data, {"model_type": "wrapper", "text_config": model})
    assert "quantization_config" not in config["text_config"]


def problem(data, model, **options) -> str:
    loader = MemoryLoader(tensors=data, model=model)
    plan = Pipeline(loader=loader, preprocess=[MoeToBf16(**options)], writer=MemoryWriter()).plan()
    return "\n".join(plan.problems)


@pytest.mark.parametrize(("declared", "found"), [("fp8", "BF16: say bf16 or auto"), ("fp16", "BF16: say bf16 or auto")])
def test_a_declared_type_is_checked(declared, found):
    message = problem(checkpoints.tensors(), checkpoints.config(), input_type=declared)
    assert (
        f"the input type was given as {declared}, but gate, up, down are {found}" in message
        and message.count("input type") == 1
    )
    assert problem(checkpoints.tensors(), checkpoints.config(), input_type="bf16") == ""


def test_what_is_wrong_with_scales_is_said():
    name = checkpoints.expert_name(0, 0, "gate")
    data, model = fp8_model(256, 128, (128, 128))
    scale = data.pop(name + "_scale_inv")
    assert (
        "gate_proj.weight is FP8, but its scale (weight_scale_inv, weight_scale, scale, qscale_weight) is missing"
        in problem(data, model)
    )
    wrong = {**data, name + "_scale_inv": np.ones((3, 1), np.float32)}
    assert "_scale_inv is [3, 1], which is no scale for all, for rows or for blocks of [128, 128]" in problem(
        wrong, model
    )
    integers = {**data, name + "_scale_inv": scale.astype(np.int32)}
    assert "is I32; it must be F32 or F16 or BF16 or F8_E8M0 or U8" in problem(integers, model)
    model["quantization_config"]["weight_block_size"] = [96, 128]
    assert "_scale_inv is [2, 1], which is no scale for all, for rows or for blocks of [96, 128]" in problem(
        data, model
    )


def test_forms_it_does_not_read_are_named():
    name = checkpoints.expert_name(0, 0, "gate").removesuffix("weight")
    data = checkpoints.tensors()
    del data[name + "weight"]
    data[name + "hidden"] = np.zeros((2, 2), np.int32)
    assert "gate is stored as hidden, which moe-to-bf16 does not read" in problem(data, checkpoints.config())
    data = {**checkpoints.tensors(), name + "weight_scale_inv": np.ones((1, 1), np.float32)}
    assert "gate is stored as weight, weight_scale_inv, which moe-to-bf16 does not read" in problem(
        data, checkpoints.config()
    )


def dense(form, *, preprocess, **stages):
    loader = MemoryLoader(**dict(zip(("tensors", "model"), forms.dense(form), strict=True)))
    writer = MemoryWriter()
    plan = Pipeline(loader=loader, preprocess=preprocess, writer=writer, **stages).plan()
    return plan, {t.name: t for f in plan.files for t in f.tensors}


@pytest.mark.parametrize(("form", "stage"), [("fp8", Fp8), ("compressed-tensors", CompressedTensorsFormat),
                                             ("gptq", Gptq), ("awq", Awq)])  # fmt: skip
def test_a_dense_model_becomes_bf16_by_its_formats_own_preprocessor(form, stage):
    plan, made = dense(form, preprocess=[stage()])
    assert plan.problems == () and "quantization_config" not in json.loads(plan.config_json)
    assert made.keys() == forms.dense()[0].keys() and {t.dtype for t in made.values()} == {checkpoints.BF16}


def test_a_preprocessor_of_another_format_is_refused():
    plan, _ = dense("gptq", preprocess=[Fp8()])
    (problem,) = plan.problems
    assert "config.json that says how: with model.layers.0.mlp.down_proj." in problem
    assert problem.endswith(
        " beside it, it is in no form that is read here; add the preprocessor of its format, or moe-to-bf16 for a MoE "
        "model"
    )
    assert dense("gptq", preprocess=[Fp8(), Gptq()])[0].problems == ()


@pytest.mark.parametrize("stage", [MoeToBf16(), SplitExperts()])
def test_a_dense_model_has_no_experts_for_it(stage):
    with pytest.raises(CheckpointError, match=f"this is a dense model .*{stage.name} converts experts alone"):
        dense("fp8", preprocess=[Fp8(), stage])


def test_on_the_way_to_a_layout_the_matrices_of_a_dense_model_become_bf16():
    stages = {"quantize": Int4(group_size=32), "layout": CompressedTensors()}
    plan, made = dense("fp16", preprocess=[MoeToBf16()], **stages)
    assert plan.problems == () and "model.layers.0.self_attn.q_proj.weight_packed" in made
    (problem,) = dense("fp16", preprocess=[MoeToBf16(input_type="fp8")], **stages)[0].problems
    assert "the input type was given as fp8, for experts, and there are none: say auto" in problem
