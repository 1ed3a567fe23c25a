"""Fused experts give the very bytes that the same experts give one by one."""

import tracemalloc

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16, EXPERTS, HIDDEN, LAYERS, SIZE, fuse
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsLoader, SplitExperts
from ktforge_plugins.preprocess.split_experts import _Cut

from ktforge import Pipeline, TensorSpec, Unit, UnitSpec, Unsupported
from ktforge.contract.tensors import DTYPES
from ktforge.testing import MemoryLoader, MemoryWriter

E8M0 = DTYPES["F8_E8M0"]


def convert(data, *, layout=True, split=None, **changes):
    writer = MemoryWriter()
    stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=2)} if layout else {}
    pipeline = Pipeline(
        loader=MemoryLoader(tensors=data, model=checkpoints.config(**changes)),
        preprocess=[split or SplitExperts(), MoeToBf16()], writer=writer, **stages,
    )  # fmt: skip
    plan = pipeline.run(workers=2).plan
    return plan, writer.tensors


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("qwen3_5_moe_text", {}),
        ("qwen3_vl_moe_text", {"transposed": True}),
        ("llama4_text", {"transposed": True, "stem": "feed_forward.experts"}),
        ("gpt_oss", {"transposed": True, "interleaved": True}),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_fused_experts_are_those_experts(model_type, form, dtype):
    data = {n: a.astype(dtype) for n, a in checkpoints.tensors().items()}
    plan, made = convert(fuse(data, **form), model_type=model_type)
    assert plan.expert_units == LAYERS * EXPERTS
    same(made, convert(data)[1])


def test_without_a_layout_the_experts_get_their_usual_names():
    data = checkpoints.tensors()
    same(convert(fuse(data), layout=False, model_type="qwen3_5_moe_text")[1], data)


def test_not_split_they_keep_the_names_they_have():
    data = fuse(checkpoints.tensors(), transposed=True)
    half = {n: a.astype(np.float16) if ".experts." in n else a for n, a in data.items()}
    writer = MemoryWriter()
    loader = MemoryLoader(tensors=half, model=checkpoints.config(model_type="qwen3_vl_moe_text"))
    plan = Pipeline(loader=loader, preprocess=[MoeToBf16()], writer=writer).run().plan
    assert plan.expert_units == LAYERS * EXPERTS
    same(writer.tensors, {n: a.astype(np.float16).astype(BF16) if ".experts." in n else a for n, a in data.items()})


@pytest.mark.parametrize(("size", "hidden"), [(128, 256), (256, 256)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_two_tensors_together_settle_the_axis_order(size, hidden, transposed):
    """2I = H makes gate_up square, I = H makes down square; never both."""
    shapes = {"gate_up": (3, 2 * size, hidden), "down": (3, hidden, size)}
    arrays = {f"{p}.weight": np.arange(np.prod(s), dtype=np.int32).reshape(s) for p, s in shapes.items()}
    expected = arrays["gate_up.weight"][1, size:], arrays["down.weight"][1]
    if transposed:
        arrays = {r: np.ascontiguousarray(a.swapaxes(1, 2)) for r, a in arrays.items()}
    unit = fused_unit(arrays)
    stage = bound(moe_intermediate_size=size, hidden_size=hidden)
    _, second, _ = stage.apply(unit)
    assert np.array_equal(second.tensors["up.weight"], expected[0])
    assert np.array_equal(second.tensors["down.weight"], expected[1])
    assert [u.tensors["gate.weight"].shape for u in stage.plan(unit.spec)] == [(size, hidden)] * 3


def fused_unit(arrays) -> Unit:
    name = "model.layers.0.mlp.experts"
    specs = {r: TensorSpec(f"{name}.{r}", a.dtype, a.shape) for r, a in arrays.items()}
    return Unit(UnitSpec(name, specs, 0, fused=True), arrays)


def bound(split=None, **changes):
    return (split or SplitExperts()).bind(checkpoints.config(**{"model_type": "qwen3_5_moe_text", **changes}))


def test_what_is_stored_beside_a_weight_is_cut_with_it():
    gate_up = np.arange(2 * 8 * 4).reshape(2, 8, 4)
    arrays = {
        "gate_up.weight": gate_up, "gate_up.bias": np.arange(16).reshape(2, 8),
        "gate_up.weight_zero_point": np.arange(2 * 4 * 2).reshape(2, 4, 2),
        "down.weight": np.zeros((2, 4, 4), np.int64), "down.bias": np.arange(8).reshape(2, 4),
    }  # fmt: skip
    second = list(bound(moe_intermediate_size=4, hidden_size=4).apply(fused_unit(arrays)))[1]
    assert second.tensors["up.bias"].tolist() == [12, 13, 14, 15]
    assert second.tensors["gate.weight_zero_point"].tolist() == [[8, 9], [10, 11]]
    assert second.tensors["down.bias"].tolist() == [4, 5, 6, 7]
    assert np.array_equal(second.tensors["up.weight"], gate_up[1, 4:])
    alternating = bound(SplitExperts(gate_up="interleaved"), moe_intermediate_size=4, hidden_size=4)
    with pytest.raises(Unsupported, match="blocks that hold rows of gate and of up: put moe-to-bf16 before"):
        list(alternating.apply(fused_unit(arrays)))
    del arrays["gate_up.weight_zero_point"]
    second = list(alternating.apply(fused_unit(arrays)))[1]
    assert second.tensors["up.bias"].tolist() == [9, 11, 13, 15]


SCALES = {
    "blocks": lambda e, n, k: (e, -(-n // 128), -(-k // 128)), "rows": lambda e, n, k: (e, n, 1),
    "one": lambda e, n, k: (e,), "one, flat": lambda e, n, k: (e, 1), "one, as a block": lambda e, n, k: (e, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("scale_of", SCALES)
@pytest.mark.parametrize("how", ["halves", "interleaved"])
@pytest.mark.parametrize("size", [224, 256])
@pytest.mark.parametrize("activation", [False, True])
@pytest.mark.parametrize("stored", [np.float32, BF16, np.uint8, E8M0])
def test_scales_of_every_granularity_go_with_their_rows(scale_of, how, size, activation, stored):
    """224 rows of each in blocks of 128: the second block has rows of both. Cut first or made BF16 first: the same."""
    random = np.random.default_rng(0)
    arrays = {}
    for projection, (n, k) in {"gate_up": (2 * size, 128), "down": (128, size)}.items():
        arrays[f"{projection}.weight"] = random.standard_normal((2, n, k), np.float32).astype(checkpoints.F8)
        scale = random.random(SCALES[scale_of](2, n, k), np.float32) + 0.5
        exponents = random.integers(120, 134, scale.shape, np.uint8)
        arrays[f"{projection}.weight_scale_inv"] = (
            exponents.view(stored) if np.dtype(stored).itemsize == 1 else scale.astype(stored)
        )
        if activation:
            arrays[f"{projection}.activation_scale"] = np.ones(2, np.float32)
    quantization = {"weight_block_size": [128, 128]} if scale_of == "blocks" else {"quant_method": "fp8"}
    model = {"moe_intermediate_size": size, "hidden_size": 128, "num_experts": 2, "quantization_config": quantization}
    split, plain = bound(SplitExperts(gate_up=how), **model), MoeToBf16().bind(checkpoints.config(**model))
    cut_first = [made for one in split.apply(fused_unit(arrays)) for made in plain.apply(one)]
    (whole,) = plain.apply(fused_unit(arrays))
    for one, other in zip(cut_first, split.apply(whole), strict=True):
        assert one.tensors.keys() == other.tensors.keys() == {"gate.weight", "up.weight", "down.weight"}
        for role in other.tensors:
            assert one.spec.tensors[role].shape == other.spec.tensors[role].shape
            assert one.tensors[role].tobytes() == other.tensors[role].tobytes()


@pytest.mark.parametrize("scale_of", ["blocks", "rows"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_fp8_is_cut_with_its_scales(scale_of, transposed):
    """Qwen's blocks, and a number for each output as in Llama 4's FP8, whichever way the weights lie."""
    plain, fused = {}, {}
    for name, array in fuse(checkpoints.tensors()).items():
        if ".experts." not in name:
            plain[name] = fused[name] = array
            continue
        block = (128, 128) if scale_of == "blocks" else (1, array.shape[2])
        made = [checkpoints.to_fp8(one, block, seed) for seed, one in enumerate(array)]
        weight, scale = (np.stack(parts) for parts in zip(*made, strict=True))
        spread = np.repeat(np.repeat(scale, block[0], 1), block[1], 2)
        plain[name] = (weight.astype(np.float32) * spread).astype(BF16)
        flip = (0, 2, 1) if transposed else (0, 1, 2)
        fused[name] = np.ascontiguousarray(weight.transpose(flip))
        fused[name + ("_scale_inv" if scale_of == "blocks" else "_scale")] = np.ascontiguousarray(scale.transpose(flip))
    model_type = "llama4_text" if transposed else "qwen3_5_moe_text"
    if transposed:
        fused = {n.replace(".mlp.experts.", ".feed_forward.experts."): a for n, a in fused.items()}
    same(convert(fused, model_type=model_type)[1], convert(plain, model_type="qwen3_5_moe_text")[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "brand_new"},
            "is not known of model_type 'brand_new': say --gate-up halves or --gate-up interleaved .*{gate_up",
        ),
        (
            {"moe_intermediate_size": 100},
            r"do not fit hidden size 256 and expert size 100 \(config.json\) in either",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(changes, message):
    data = fuse(checkpoints.tensors())
    unit = fused_unit({f"{p}.weight": data[f"model.layers.0.mlp.experts.{p}_proj"] for p in ("gate_up", "down")})
    with pytest.raises(Unsupported, match=message):
        bound(**changes).plan(unit.spec)


def separate(transposed: bool, size=SIZE, hidden=HIDDEN) -> Unit:
    """Two experts with gate and up in tensors of their own."""
    shapes = {"gate": (2, size, hidden), "up": (2, size, hidden), "down": (2, hidden, size)}
    arrays = {f"{p}.weight": np.random.default_rng(1).standard_normal(s).astype(BF16) for p, s in shapes.items()}
    return fused_unit({r: np.ascontiguousarray(a.swapaxes(1, 2)) if transposed else a for r, a in arrays.items()})


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_may_be_apart(transposed):
    unit = separate(transposed)
    _, second = bound(model_type="step3p5").apply(unit)
    for role, array in unit.tensors.items():
        assert np.array_equal(second.tensors[role], array[1].T if transposed else array[1])


def test_an_order_that_sizes_leave_open_is_asked_for():
    unit = separate(False, 256, 256)
    sizes = {"moe_intermediate_size": 256, "model_type": "step3p5"}
    with pytest.raises(Unsupported, match=r"are both 256, .* say --expert-order out-in or --expert-order in-out"):
        bound(**sizes).plan(unit.spec)
    for order in ("out-in", "in-out"):
        first, _ = bound(SplitExperts(order=order), **sizes).apply(unit)
        up = unit.tensors["up.weight"][0]
        assert np.array_equal(first.tensors["up.weight"], up if order == "out-in" else up.T)
    with pytest.raises(Unsupported, match="in the order in-out"):
        bound(SplitExperts(order="in-out"), model_type="step3p5").plan(separate(False).spec)


def test_the_option_settles_what_the_model_type_does_not():
    data = fuse(checkpoints.tensors())
    split = SplitExperts(gate_up="halves")
    same(convert(data, model_type="brand_new", split=split)[1], convert(checkpoints.tensors())[1])


def test_a_layout_needs_the_experts_apart():
    loader = MemoryLoader(tensors=fuse(checkpoints.tensors()), model=checkpoints.config(model_type="qwen3_5_moe"))
    pipeline = Pipeline(
        loader=loader, preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(), writer=MemoryWriter()
    )  # fmt: skip
    assert pipeline.plan().problems == (
        "model.layers.0.mlp.experts (and 1 more): all experts of the layer are in one tensor: put split-experts first "
        "under preprocess",
    )


def test_biases_have_no_place_in_kt_amx():
    data = fuse(checkpoints.tensors(), transposed=True, interleaved=True, biases=True)
    loader = MemoryLoader(tensors=data, model=checkpoints.config(model_type="gpt_oss"))
    pipeline = Pipeline(
        loader=loader, preprocess=[SplitExperts(), MoeToBf16()], quantize=Int4(), layout=KtAmx(), writer=MemoryWriter()
    )  # fmt: skip
    (problem,) = pipeline.plan().problems
    assert problem.endswith("kt-amx has no place for the biases of gate, up, down: `ktforge moe-to-bf16` keeps them")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_tensor_is_never_in_memory(tmp_path, transposed):
    experts, size, hidden = 32, 128, 256
    data = {
        "model.layers.0.mlp.experts.gate_up_proj": np.zeros((experts, 2 * size, hidden), BF16),
        "model.layers.0.mlp.experts.down_proj": np.zeros((experts, hidden, size), BF16),
    }
    if transposed:
        data = {n: np.ascontiguousarray(a.swapaxes(1, 2)) for n, a in data.items()}
    one = 3 * size * hidden * 2
    model = checkpoints.config(
        model_type="qwen3_vl_moe", num_experts=experts, moe_intermediate_size=size, num_hidden_layers=1
    )  # fmt: skip
    pipeline = Pipeline(
        loader=SafetensorsLoader(path=checkpoints.write(tmp_path, data, model)),
        preprocess=[SplitExperts(), MoeToBf16()], quantize=Int4(), layout=KtAmx(threadpool_count=1),
        writer=MemoryWriter(),
    )  # fmt: skip
    plan = pipeline.plan()
    assert plan.problems == () and plan.peak_memory(1) < 4 * one
    stage = next(s for s in plan.pipeline.preprocess if isinstance(s, SplitExperts))
    source = plan.units[0].source
    unit = Unit(source, {r: pipeline.loader.read(t) for r, t in source.tensors.items()})
    tracemalloc.start()
    for made in stage.apply(unit):
        assert all(a.flags.c_contiguous for a in made.tensors.values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * one, f"{peak:,} bytes for experts of {one:,}"


def test_the_shape_of_a_cut_is_computed_and_not_made():
    """Of a scale that no memory holds; and of each cut, it is that of the view."""
    shapes = {"gate_up.weight": (1, 512, 128), "gate_up.weight_scale": (1, 512, 10**15), "down.weight": (1, 128, 256)}
    tensors = {role: TensorSpec(f"x.{role}", BF16, shape) for role, shape in shapes.items()}
    config = checkpoints.config(hidden_size=128, moe_intermediate_size=256, num_experts=1)
    stage = SplitExperts(gate_up="halves").bind(config)
    (made,) = stage.plan(UnitSpec("x", tensors, 0, fused=True))
    assert made.tensors["up.weight_scale"].shape == (256, 10**15)
    for rows in (slice(None), slice(0, 3), slice(3, None), slice(0, None, 2), slice(1, None, 2)):
        for axis, transposed in ((0, False), (1, True)):
            cut = _Cut("x", rows, axis, transposed)
            assert cut.shape((7, 9)) == cut.of(np.empty((7, 9))).shape


def test_a_fused_tensor_without_an_axis_is_refused():
    data = {n: np.zeros((), BF16) if n.endswith("gate_up_proj") else a for n, a in fuse(checkpoints.tensors()).items()}
    loader = MemoryLoader(tensors=data, model=checkpoints.config())
    plan = Pipeline(loader=loader, preprocess=[SplitExperts()], writer=MemoryWriter()).plan()
    assert (
        f"model.layers.0.mlp.experts.gate_up_proj (BF16 []) has no first axis of {EXPERTS} experts" in plan.problems[0]
    )


@pytest.mark.parametrize(
    "model_type", ["mixtral", "minimax_m2", "phimoe", "kimi_linear", "jamba", "lfm2_moe", "deepseek_v4"]
)
def test_listed_families_as_transformers_holds_them(model_type):
    stem = "feed_forward.experts" if model_type in ("jamba", "lfm2_moe") else "mlp.experts"
    made = convert(fuse(checkpoints.tensors(), stem=stem), model_type=model_type)[1]
    same(made, convert(checkpoints.tensors(), model_type="qwen3_moe")[1])


@pytest.mark.parametrize(("name", "interleaved"), [("w13_weight", True), ("gate_up_proj", False)])
def test_a_family_may_fuse_in_two_ways_under_two_names(name, interleaved):
    """Inkling's own files have rows of gate and up in turn, what transformers holds in memory has halves."""
    data = fuse(checkpoints.tensors(), interleaved=interleaved)
    if interleaved:
        data = {n.replace("gate_up_proj", name).replace("down_proj", "w2_weight"): a for n, a in data.items()}
    made = convert({n.replace("model.", "model.llm.", 1): a for n, a in data.items()}, model_type="inkling_text")[1]
    same(made, convert(checkpoints.tensors(), model_type="qwen3_moe")[1])
