"""Bit for bit what the compressed-tensors library makes of what it has written."""

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import BF16
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from ktforge_plugins import CompressedTensorsFormat, Int4, KtAmx, MoeToBf16, SplitExperts
from ktforge_plugins.preprocess.compressed_tensors import Targets
from preprocess.units import EXPERT, weight, weight_unit
from torch_arrays import to_numpy, to_torch

from ktforge import CheckpointError, Pipeline, Unsupported
from ktforge.testing import MemoryLoader, MemoryWriter

ROWS, COLS = 24, 128


def config(args: QuantizationArgs, targets=("Linear",), ignore=("lm_head",)) -> dict:
    weights = args.model_dump(mode="json")
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore),
            "config_groups": {"group_0": group},
        }
    }  # fmt: skip


def stored(args: QuantizationArgs, dtype=torch.bfloat16, compressor=PackedQuantizationCompressor, seed=0):
    """A random weight as the library stores it, and what the library reads back."""
    torch.manual_seed(seed)
    groups = COLS // args.group_size if args.group_size else 1
    shape = (1,) if args.strategy == "tensor" else (ROWS, groups)
    low, high = -(1 << (args.num_bits - 1)), (1 << (args.num_bits - 1)) - 1
    state = {
        "weight": (torch.randn(ROWS, COLS) * 0.05).to(dtype),
        "weight_scale": (torch.rand(shape) * 0.02 + 0.001).to(dtype),
    }
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(low, high + 1, shape, dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = compressor.compress(state, scheme)
    reference = compressor.decompress(state, scheme)["weight"]
    return {name: to_numpy(t) for name, t in state.items()}, reference


def args_of(bits, strategy, symmetric=True):
    group = 32 if strategy == "group" else None
    return QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group)


#: The library does not pack zero points of whole tensors; int-quantized weights have 8 bits.
FORMS = [
    (args_of(bits, strategy, symmetric), compressor)
    for compressor in (PackedQuantizationCompressor, NaiveQuantizationCompressor)
    for bits in ((2, 4, 8) if compressor is PackedQuantizationCompressor else (8,))
    for symmetric in (True, False)
    for strategy in ("group", "channel", "tensor")
    if symmetric or strategy != "tensor"
]


@pytest.mark.parametrize(("args", "compressor"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_weight_is_what_the_library_reads(args, dtype, compressor):
    arrays, reference = stored(args, dtype, compressor)
    got = weight(CompressedTensorsFormat(), arrays, config(args))
    bits, expected = got.view(np.uint16), to_numpy(reference.to(torch.bfloat16)).view(np.uint16)
    if dtype == torch.float16:
        # The library rounds to float16 before anybody can round to bf16; once is nearer to the truth.
        assert np.abs(bits.astype(int) - expected.astype(int)).max() <= 1
        assert (bits != expected).mean() < 0.05
    else:
        assert np.array_equal(bits, expected)


def test_columns_that_do_not_fill_a_word():
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=4)
    torch.manual_seed(0)
    state = {"weight": torch.randn(8, 12).bfloat16(), "weight_scale": torch.full((8, 3), 0.2).bfloat16()}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = PackedQuantizationCompressor.compress(state, scheme)
    reference = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    got = weight(CompressedTensorsFormat(), {n: to_numpy(t) for n, t in state.items()}, config(args))
    assert got.tobytes() == to_numpy(reference).tobytes()


def test_an_order_of_the_columns_chooses_their_groups():
    args = args_of(4, "group")
    arrays, _ = stored(args)
    order = np.random.default_rng(0).permutation(np.arange(COLS) // 32).astype(np.int32)
    got = weight(CompressedTensorsFormat(), arrays | {"weight_g_idx": order}, config(args))
    codes = weight(
        CompressedTensorsFormat(), arrays | {"weight_scale": np.ones((ROWS, COLS // 32), BF16)}, config(args)
    )
    scale = arrays["weight_scale"].astype(np.float32)[:, order]
    assert got.tobytes() == (codes.astype(np.float32) * scale).astype(BF16).tobytes()
    unset = weight(CompressedTensorsFormat(), arrays | {"weight_g_idx": np.full(COLS, -1, np.int32)}, config(args))
    assert unset.tobytes() == weight(CompressedTensorsFormat(), arrays, config(args)).tobytes()


def test_bytes_hold_two_codes_too():
    args = args_of(4, "group")
    arrays, reference = stored(args)
    arrays["weight_packed"] = arrays["weight_packed"].view(np.uint8)
    assert weight(CompressedTensorsFormat(), arrays, config(args)).tobytes() == to_numpy(reference).tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "weight_packed is packed, but its weight_scale is missing"),
        (
            {"weight_scale": np.ones((ROWS, 5), BF16)},
            r"does not hold the 160 columns of .*weight_scale \(BF16 \[24, 5\]",
        ),
        ({"weight_scale": np.ones((ROWS + 1, 4), BF16)}, r"\[25, 4\]\) does not fit groups of 32 \(config.json\)"),
        ({"weight_zero_point": np.ones((4, 4), np.int32)}, r"weight_zero_point \(I32 \[4, 4\]\) does not fit"),
        ({"weight_g_idx": np.ones(7, np.int32)}, r"weight_g_idx .* must be integers \[128\]"),
        ({"weight_shape": np.ones(3, np.int64)}, "weight_shape .* must be two integers"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = args_of(4, "group")
    arrays = {n: a for n, a in ({**stored(args)[0], **change}).items() if a is not None}
    with pytest.raises(Unsupported, match=message):
        CompressedTensorsFormat().bind(config(args)).plan(weight_unit(arrays).spec)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "weight_shape",
            np.array([ROWS, COLS - 1]),
            r"weight_shape is \[24, 127\], but .* holds \[24, 128\] in 4 bits",
        ),
        ("weight_g_idx", np.full(COLS, 4, np.int32), "weight_g_idx points to a group outside the 4"),
        ("weight_g_idx", np.eye(1, COLS, 9, dtype=np.int32)[0] * 4, "weight_g_idx points to a group outside the 4"),
        ("weight_g_idx", -np.eye(1, COLS, 9, dtype=np.int32)[0], "weight_g_idx points to a group outside the 4"),
        ("weight_g_idx", np.arange(COLS, dtype=np.int32) - 1, "weight_g_idx points to a group outside the 4"),
    ],
)
def test_content_that_contradicts_its_header_is_an_error(name, array, message):
    args = args_of(4, "group")
    with pytest.raises(CheckpointError, match=message):
        weight(CompressedTensorsFormat(), stored(args)[0] | {name: array}, config(args))


@pytest.mark.parametrize(
    ("targets", "ignore", "message"),
    [
        (["re:.*experts.*"], [], None),
        ([f"{EXPERT}.gate_proj"], ["re:.*self_attn.*"], None),
        (["KimiLinear"], [], None),
        (["re:.*mlp\\.gate$"], [], "no quantization_config.config_groups of config.json is for it"),
        (["Linear"], ["re:.*gate_proj"], "is quantised, but config.json lists .*gate_proj under ignore"),
    ],
)
def test_targets_and_ignore_are_heeded(targets, ignore, message):
    args = args_of(4, "group")
    stage = CompressedTensorsFormat().bind(config(args, targets, ignore))
    unit = weight_unit(stored(args)[0])
    if message is None:
        assert stage.plan(unit.spec)[0].tensors["gate.weight"].dtype == BF16
    else:
        with pytest.raises(Unsupported, match=message):
            stage.plan(unit.spec)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(Unsupported, match=r"quantization_config has a pattern that is none: '\*\('"):
        CompressedTensorsFormat().bind(config(args_of(4, "group"), ["re:*("]))


def test_a_name_goes_before_a_class():
    four, eight = (QuantizationArgs(num_bits=b, strategy="group", group_size=32) for b in (4, 8))
    both = config(four)
    other = config(eight, targets=["re:.*experts.*"])["quantization_config"]["config_groups"]["group_0"]
    both["quantization_config"]["config_groups"]["group_1"] = other
    arrays, reference = stored(eight)
    assert weight(CompressedTensorsFormat(), arrays, both).tobytes() == to_numpy(reference).tobytes()


def kimi_checkpoint() -> tuple[dict, dict, dict]:
    """Experts in INT4 as Kimi-K2 has them, below ``language_model.`` as K2.5 has them; the same dequantised; config."""
    args = args_of(4, "group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed, plain = {}, {}
    for name, array in checkpoints.tensors().items():
        wrapped = f"language_model.{name}"
        if ".experts." not in name:
            packed[wrapped] = plain[wrapped] = array
            continue
        tensor = to_torch(array)
        scale = (tensor.float().unflatten(-1, (-1, 32)).abs().amax(-1) / 7.5).bfloat16()
        state = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        packed |= {wrapped.removesuffix("weight") + n: to_numpy(t) for n, t in state.items()}
        plain[wrapped] = to_numpy(PackedQuantizationCompressor.decompress(state, scheme)["weight"])
    text = {**checkpoints.config(model_type="kimi_k2"), **config(args, ignore=["re:.*self_attn.*", "lm_head"])}
    return packed, plain, {"model_type": "kimi_k25", "text_config": text}


@pytest.mark.parametrize("layout", [False, True])
def test_kimi_k2_from_end_to_end(layout):
    packed, plain, model = kimi_checkpoint()
    results = []
    for data in (packed, plain):
        writer = MemoryWriter()
        stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=2)} if layout else {}
        loader = MemoryLoader(tensors=data, model=model)
        plan = (
            Pipeline(loader=loader, preprocess=[SplitExperts(), MoeToBf16()], writer=writer, **stages)
            .run(workers=2)
            .plan
        )
        assert b"config_groups" not in plan.config_json and (b"quantization_config" in plan.config_json) == layout
        results.append({n: a.tobytes() for n, a in writer.tensors.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+!$", r"(?:a|a)*!", r"(a\\)+", r"(x{1,9}){9}", ".*" * 5 + "!", "a?" * 30 + "a" * 30,
        "(a|a)" * 30, "x" * 201,
    ],
)  # fmt: skip
def test_a_pattern_that_may_take_forever_is_refused(pattern):
    for model in (
        config(args_of(4, "group"), ignore=[f"re:{pattern}"]),
        config(args_of(4, "group"), [f"re:{pattern}"]),
    ):
        with pytest.raises(Unsupported, match="has a pattern that may take forever to match"):
            CompressedTensorsFormat().bind(model)


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        (r".*self_attn.*", "model.layers.0.self_attn.q_proj"),
        (r".*mlp\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.up_proj"),
        (r".*shared_experts.*", "model.layers.0.mlp.shared_experts.up_proj"),
        (r"^model\.layers\.\d+\..*", "model.layers.17.mlp.up_proj"),
        (r".*\.layers\.[0-9]+\.mlp\.experts\.\d+\.(gate|up)_proj$", "model.layers.3.mlp.experts.5.up_proj"),
    ],
)
def test_patterns_in_use_are_read(pattern, module):
    targets = Targets.of([f"re:{pattern}"])
    assert targets.name(module) and not targets.name("lm_head")
