"""MXFP4 and NVFP4 against transformers and compressed-tensors; gpt-oss and DeepSeek-V4 as whole models."""

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import BF16, EXPERTS, HIDDEN, LAYERS, SIZE
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from ktforge_plugins import Fp4, Int4, KtAmx, MoeToBf16, SplitExperts
from preprocess.units import fused_unit, made, weight, weight_unit
from torch_arrays import to_numpy, to_torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from ktforge import Pipeline, Unsupported
from ktforge.contract.tensors import DTYPES, F8_E4M3
from ktforge.testing import MemoryLoader, MemoryWriter

ROWS, COLS = 24, 192
E8M0 = DTYPES["F8_E8M0"]
RANDOM = np.random.default_rng(0)


def codes(rows=ROWS, cols=COLS) -> np.ndarray:
    return RANDOM.integers(0, 256, (rows, cols // 2), np.uint8)


def exponents(rows=ROWS, groups=COLS // 32) -> np.ndarray:
    return RANDOM.integers(100, 140, (rows, groups), np.uint8)


@pytest.mark.parametrize("carrier", ["weight", "weight_packed"])
@pytest.mark.parametrize("kind", [np.int8, np.uint8], ids=str)
@pytest.mark.parametrize("name", ["scale", "weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [E8M0, np.uint8], ids=str)
def test_mxfp4_under_all_its_names(carrier, kind, name, dtype):
    stored, scale = codes().view(kind), exponents().view(dtype)
    expected = Fp8Dequantize(None)._dequantize_one(to_torch(stored.view(np.int8)), to_torch(scale), torch.bfloat16)
    assert weight(Fp4(), {carrier: stored, name: scale}).tobytes() == to_numpy(expected).tobytes()


def test_every_code_and_exponent():
    """All 16 numbers with all exponents but NaN, signed zeros and results below the normal range included."""
    every = np.arange(256, dtype=np.uint8)
    stored = np.tile(np.arange(16, dtype=np.uint8) | np.arange(16, dtype=np.uint8)[::-1] << 4, (255, 1))
    expected = np.zeros((255, 32), np.float64)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected[:, ::2], expected[:, 1::2] = values[stored & 15], values[stored >> 4]
    with np.errstate(over="ignore"):
        expected = (expected * 2.0 ** (every[:255, None].astype(float) - 127)).astype(np.float32).astype(BF16)
    got = weight(Fp4(), {"weight": stored, "scale": every[:255, None].copy()})
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_compressed_tensors_packed_floats(form):
    torch.manual_seed(0)
    group = {"mxfp4": 32, "nvfp4": 16}[form]
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group" if form == "mxfp4" else "tensor_group", group_size=group,
        scale_dtype=torch.uint8 if form == "mxfp4" else torch.float8_e4m3fn,
    )  # fmt: skip
    state = {"weight": torch.randn(ROWS, COLS, dtype=torch.bfloat16)}
    if form == "mxfp4":
        state["weight_scale"] = 2.0 ** torch.randint(-6, 2, (ROWS, COLS // group)).float()
    else:
        state["weight_scale"] = torch.rand(ROWS, COLS // group) * 400 + 1
        state["weight_global_scale"] = torch.tensor([371.5])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = MXFP4PackedCompressor if form == "mxfp4" else NVFP4PackedCompressor
    state = compressor.compress(state, scheme)
    arrays = {n: to_numpy(t) for n, t in state.items()}
    expected = compressor.decompress(state, scheme)["weight"]
    assert weight(Fp4(), arrays).tobytes() == to_numpy(expected.bfloat16()).tobytes()
    assert weight(MoeToBf16(), arrays).tobytes() == to_numpy(expected.bfloat16()).tobytes()


def test_nvfp4_of_model_optimizer():
    stored, scale = codes(), (RANDOM.random((ROWS, COLS // 16)) * 400).astype(np.float32).astype(F8_E4M3)
    whole = np.float32(0.0031)
    got = weight(Fp4(), {"weight": stored, "weight_scale": scale, "weight_scale_2": whole, "input_scale": whole})
    ones = np.full((ROWS, COLS // 32), 127, np.uint8)
    numbers = weight(Fp4(), {"weight": stored, "weight_scale": ones}).astype(np.float32)
    spread = np.repeat(scale.astype(np.float32) * whole, 16, axis=1)
    assert got.tobytes() == (numbers * spread).astype(BF16).tobytes()


def blocks(rows, cols, count=EXPERTS):
    shape = (count, rows, cols // 32)
    return RANDOM.integers(0, 256, (*shape, 16), np.uint8), RANDOM.integers(110, 125, shape, np.uint8)


def test_blocks_of_gpt_oss_get_the_names_and_the_order_of_its_model_class():
    stored, scale = blocks(2 * SIZE, HIDDEN)
    result = made(MoeToBf16(), fused_unit({"gate_up.blocks": stored, "gate_up.scales": scale}))
    expected = _convert_moe_packed_tensors(to_torch(stored), to_torch(scale))
    assert result.spec.tensors["gate_up.weight"].name == "model.layers.0.mlp.experts.gate_up_proj"
    assert result.tensors["gate_up.weight"].shape == (EXPERTS, HIDDEN, 2 * SIZE)
    assert result.tensors["gate_up.weight"].tobytes() == to_numpy(expected).tobytes()


def gpt_oss(biases: bool) -> tuple[dict, dict]:
    """A gpt-oss in MXFP4, and the same with its experts as BF16."""
    data = {n: a for n, a in checkpoints.tensors().items() if ".experts." not in n}
    plain = dict(data)
    for layer in range(LAYERS):
        for projection, shape in {"gate_up_proj": (2 * SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}.items():
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            data[f"{name}_blocks"], data[f"{name}_scales"] = stored, scale = blocks(*shape)
            plain[name] = to_numpy(_convert_moe_packed_tensors(to_torch(stored), to_torch(scale)))
            if biases:
                data[f"{name}_bias"] = plain[f"{name}_bias"] = np.ones((EXPERTS, shape[0]), BF16)
    return data, plain


def converted(data, preprocess, stages=None, **model):
    writer = MemoryWriter()
    loader = MemoryLoader(tensors=data, model=checkpoints.config(**model))
    plan = Pipeline(loader=loader, preprocess=preprocess, writer=writer, **(stages or {})).run(workers=2).plan
    return plan, {n: a.tobytes() for n, a in writer.tensors.items()}


def test_gpt_oss_in_mxfp4_becomes_gpt_oss_in_bf16():
    data, plain = gpt_oss(biases=True)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    plan, got = converted(data, [MoeToBf16()], model_type="gpt_oss", quantization_config=quantization)
    assert got == {n: a.tobytes() for n, a in plain.items()}
    assert b"quantization_config" not in plan.config_json


def test_blocks_are_cut_into_experts():
    """Without biases they would fit kt-amx: the same bytes as from BF16."""
    data, plain = gpt_oss(biases=False)
    stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=2)}
    results = [converted(d, [SplitExperts(), MoeToBf16()], stages, model_type="gpt_oss")[1] for d in (data, plain)]
    assert results[0] == results[1]


def test_deepseek_v4():
    """Experts in MXFP4, the rest in FP8 with exponents for blocks, all under DeepSeek's own names."""
    data, plain = {"embed.weight": np.ones((4, HIDDEN), BF16)}, {}
    plain |= data
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    for layer in range(LAYERS):
        stem = f"layers.{layer}"
        wide = (RANDOM.standard_normal((256, HIDDEN)) * 20).astype(np.float32).astype(F8_E4M3)
        data[f"{stem}.attn.wq_a.weight"], data[f"{stem}.attn.wq_a.scale"] = wide, exponents(2, 2).view(E8M0)
        plain[f"{stem}.attn.wq_a.weight"] = dequantised(wide, data[f"{stem}.attn.wq_a.scale"])
        data[f"{stem}.ffn.gate.weight"] = plain[f"{stem}.ffn.gate.weight"] = np.ones((EXPERTS, HIDDEN), BF16)
        for expert in range(EXPERTS):
            for projection, word in names.items():
                rows, cols = (HIDDEN, SIZE) if projection == "down" else (SIZE, HIDDEN)
                name = f"{stem}.ffn.experts.{expert}.{word}"
                data[f"{name}.weight"] = codes(rows, cols).view(np.int8)
                data[f"{name}.scale"] = exponents(rows, cols // 32).view(E8M0)
                plain[f"{name}.weight"] = dequantised(data[f"{name}.weight"], data[f"{name}.scale"])
    model = {
        "model_type": "deepseek_v4", "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    }  # fmt: skip
    plan, got = converted(data, [MoeToBf16()], **model)
    assert got == {n: a.tobytes() for n, a in plain.items()}
    assert b"quantization_config" not in plan.config_json and b"expert_dtype" not in plan.config_json
    stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=2)}
    assert converted(data, [MoeToBf16()], stages, **model)[1] == converted(plain, [], stages, model_type="x")[1]


def dequantised(stored, scale):
    return to_numpy(Fp8Dequantize(None)._dequantize_one(to_torch(stored), to_torch(scale), torch.bfloat16))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weight": codes(), "scale": exponents(ROWS, 5)}, r"is not one scale for 32 of the 192 columns in .*weight"),
        ({"weight_packed": codes(), "weight_scale": np.ones((ROWS, 12), F8_E4M3)}, "weight_scale_2 is missing"),
        ({"blocks": np.zeros((4, 2, 8), np.uint8), "scales": exponents(4, 2)}, "is not bytes in blocks of 16"),
        ({"blocks": np.zeros((4, 2, 16), np.uint8), "scales": exponents(4, 3)}, "is not one scale a block of"),
        ({"blocks": np.zeros((4, 2, 16), np.uint8)}, "its scales are missing"),
    ],
)
def test_what_does_not_fit_is_refused(arrays, message):
    with pytest.raises(Unsupported, match=message):
        Fp4().bind({}).plan(weight_unit(arrays).spec)
