"""FP8 with every kind of scale, against what transformers makes of it."""

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import BF16, F8
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from ktforge_plugins import Fp8, Int8, KtAmx, MoeToBf16, SafetensorsLoader
from preprocess.units import fused_unit, made, weight, weight_unit
from torch_arrays import to_numpy, to_torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from ktforge import Pipeline, Unsupported
from ktforge.contract.tensors import DTYPES
from ktforge.testing import MemoryLoader, MemoryWriter

ROWS, COLS = 48, 160
E8M0, E5M2 = DTYPES["F8_E8M0"], DTYPES["F8_E5M2"]


def random_weight(dtype=F8, rows=ROWS, cols=COLS) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, cols)) * 30).astype(np.float32).astype(dtype)


def random_scale(shape, dtype=np.float32) -> np.ndarray:
    random = np.random.default_rng(1)
    if dtype == np.uint8:
        return random.integers(110, 130, shape, np.uint8)
    if dtype == E8M0:
        return random.integers(110, 130, shape, np.uint8).view(E8M0)
    return (random.random(shape) * 0.02 + 1e-4).astype(dtype)


def reference(weight: np.ndarray, scale: np.ndarray) -> bytes:
    """transformers' own reading; it takes the blocks from the scale's grid, which must divide the weight's."""
    grid = to_torch(scale).reshape(scale.shape if scale.ndim == 2 else (-1, 1))
    made = Fp8Dequantize(None)._dequantize_one(to_torch(weight), grid, torch.bfloat16)
    return to_numpy(made).tobytes()


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, E8M0, np.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (ROWS, 5), (ROWS, 1), (ROWS,), (1,), ()], ids=str)
@pytest.mark.parametrize("kind", [F8, E5M2], ids=str)
def test_dtype_and_shape_say_what_a_scale_is(name, dtype, shape, kind):
    stored, scale = random_weight(kind), random_scale(shape, dtype)
    got = weight(Fp8(), {"weight": stored, name: scale})
    assert got.tobytes() == reference(stored, scale)


@pytest.mark.parametrize("shape", [(ROWS, COLS), (40, 130), (1, 7), (17, 64)])
def test_blocks_over_the_edge_are_cut(shape):
    stored = random_weight(rows=shape[0], cols=shape[1])
    scale = random_scale((-(-shape[0] // 16), -(-shape[1] // 32)))
    config = {"quantization_config": {"weight_block_size": [16, 32]}}
    spread = np.repeat(np.repeat(scale, 16, 0), 32, 1)[: shape[0], : shape[1]]
    expected = (stored.astype(np.float32) * spread).astype(BF16)
    assert weight(Fp8(), {"weight": stored, "weight_scale_inv": scale}, config).tobytes() == expected.tobytes()


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_compressed_tensors_float_quantized(strategy):
    block = [16, 32] if strategy == "block" else None
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=block)
    shape = {"channel": (ROWS, 1), "tensor": (1,), "block": (3, 5)}[strategy]
    state = {"weight": torch.randn(ROWS, COLS), "weight_scale": torch.rand(shape) * 0.01 + 0.001}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = NaiveQuantizationCompressor.compress(state, scheme)
    expected = NaiveQuantizationCompressor.decompress(state, scheme)["weight"].bfloat16()
    got = weight(Fp8(), {n: to_numpy(t) for n, t in state.items()})
    assert got.tobytes() == to_numpy(expected).tobytes()


def test_scales_of_activations_are_dropped():
    arrays = {"weight": random_weight(), "weight_scale": random_scale(())}
    arrays |= dict.fromkeys(["input_scale", "qscale_act"], np.float32([0.5]))
    assert weight(Fp8(), arrays).shape == (ROWS, COLS)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, ROWS, 1), (2, ROWS), (2,), (1,)], ids=str)
def test_fused_experts_are_read_one_by_one(shape):
    stored = np.stack([random_weight(), random_weight()[::-1]])
    scale = random_scale(shape)
    result = made(MoeToBf16(), fused_unit({"gate_up.weight": stored, "gate_up.weight_scale_inv": scale}))
    assert result.spec.tensors["gate_up.weight"].name == "model.layers.0.mlp.experts.gate_up_proj"
    for e in range(2):
        mine = scale if shape == (1,) else scale[e]
        assert result.tensors["gate_up.weight"][e].tobytes() == reference(stored[e], np.asarray(mine))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({}, r"is FP8, but its scale \(weight_scale_inv, weight_scale, scale, qscale_weight\) is missing"),
        ({"weight_scale": random_scale((7, 5))}, r"weight_scale is \[7, 5\], which is no scale for all, for rows"),
        ({"weight_scale": np.ones((3, 5), np.int32)}, "weight_scale is I32; it must be F32 or F16 or BF16"),
        ({"weight_scale": random_scale(()), "weight_scale_inv": random_scale(())}, "would both be its scale"),
        ({"weight_scale": random_scale((0, 5))}, r"weight_scale is \[0, 5\], which is no scale"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(scale, message):
    with pytest.raises(Unsupported, match=message):
        Fp8().bind({}).plan(weight_unit({"weight": random_weight(), **scale}).spec)


def test_what_is_not_fp8_passes_through():
    arrays = {"weight": random_weight(BF16), "weight_scale": random_scale(())}
    unit = weight_unit(arrays)
    assert Fp8().bind({}).plan(unit.spec) == [unit.spec]


@pytest.mark.parametrize("block", [(128, 128), (1, 512), (100, 60)])
@pytest.mark.parametrize("attention", [False, True])
def test_an_fp8_model_is_the_model_it_stands_for(tmp_path, block, attention):
    loader = SafetensorsLoader(path=checkpoints.fp8_checkpoint(tmp_path, block, attention))
    source = {spec.name: loader.read(spec) for spec in loader.scan()}
    plain = {}
    for name, array in source.items():
        if array.dtype == F8:
            scale = np.repeat(np.repeat(source[name + "_scale_inv"], block[0], 0), block[1], 1)
            plain[name] = (array.astype(np.float32) * scale[: array.shape[0], : array.shape[1]]).astype(BF16)
        elif not name.endswith("_scale_inv"):
            plain[name] = array
    results = []
    for checkpoint in (loader, MemoryLoader(tensors=plain, model=checkpoints.config())):
        for stages in ({}, {"quantize": Int8(), "layout": KtAmx(threadpool_count=2)}):
            writer = MemoryWriter()
            plan = Pipeline(loader=checkpoint, preprocess=[MoeToBf16()], writer=writer, **stages).run(workers=2).plan
            assert b"weight_block_size" not in plan.config_json and (
                b"quantization_config" in plan.config_json
            ) == bool(stages)
            results.append({n: a.tobytes() for n, a in writer.tensors.items()})
    assert results[0] == results[2] and results[1] == results[3]


@pytest.mark.parametrize(
    ("said", "dtype", "message"),
    [
        ("fp8", BF16, "given as fp8, but gate is BF16: say bf16 or auto"),
        ("bf16", F8, "given as bf16, but gate is F8_E4M3: say fp8 or auto"),
        ("fp16", np.float16, None),
    ],
)
def test_a_promise_about_the_input_is_checked(said, dtype, message):
    arrays = {"weight": random_weight(dtype)} | ({"weight_scale": random_scale(())} if dtype == F8 else {})
    stage = MoeToBf16(input_type=said).bind({})
    if message is None:
        assert stage.plan(weight_unit(arrays).spec)[0].tensors["gate.weight"].dtype == BF16
    else:
        with pytest.raises(Unsupported, match=message):
            stage.plan(weight_unit(arrays).spec)


def test_all_that_is_wrong_with_an_expert_is_said_at_once():
    unit = weight_unit({"weight": random_weight()})
    tensors = unit.spec.tensors | weight_unit({"qweight": np.ones((4, 4), np.int64)}, "up").spec.tensors
    with pytest.raises(Unsupported) as caught:
        MoeToBf16(input_type="bf16").bind({}).plan(unit.spec.with_tensors(tensors))
    assert len(caught.value.problems) == 3


def test_another_weight_that_nobody_reads_is_refused():
    """It would stay behind without the quantization_config that explains it."""
    data = checkpoints.tensors()
    data["model.layers.0.self_attn.q_proj.weight"] = np.zeros((256, 128), np.uint8)
    loader = MemoryLoader(tensors=data, model=checkpoints.config())
    (problem,) = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=MemoryWriter()).plan().problems
    assert "q_proj.weight: U8 weights (weight) are not read; BF16, FP16, FP32, fp8, fp4, compressed-tensors" in problem
