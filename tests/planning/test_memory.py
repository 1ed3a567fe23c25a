"""The bound that a plan gives holds for every form of source, and is not far off."""

import tracemalloc
from pathlib import Path
from typing import ClassVar

import checkpoints
import forms
import numpy as np
import pytest
from checkpoints import BF16, fuse, to_fp8
from ktforge_plugins import (
    BinLoader,
    CompressedTensors,
    Int4,
    Int8,
    KtAmx,
    MoeToBf16,
    SafetensorsLoader,
    SafetensorsWriter,
    SplitExperts,
)

from ktforge import Pipeline, Registry, Rule
from ktforge.pipeline.presets import dequantize_pipeline
from ktforge.running.execute import execute
from ktforge.testing import MemoryLoader, MemoryWriter

REGISTRY = Registry.installed()
#: Weights of an expert, and what Python's own objects may take beside arrays.
SIZE, HIDDEN, SLACK = 1024, 768, 300_000
U8 = np.uint8


class WholeLoader(SafetensorsLoader):
    """Reads no less than a whole tensor."""

    def rows(self, spec, start, stop):
        return None


class TwoSteps(KtAmx):
    name: ClassVar[str] = "two-steps"

    def fused(self, quantizer, spec):
        return None


def experts():
    """Three experts, each with other weights."""
    random = np.random.default_rng(0)
    shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    return {
        checkpoints.expert_name(0, e, p): random.standard_normal(shape, np.float32).astype(BF16)
        for e in range(3) for p, shape in shapes.items()
    }  # fmt: skip


def fp8(block, dtype=None):
    made = {}
    for name, weight in experts().items():
        codes, scale = to_fp8(weight, block)
        made[name] = codes if dtype is None else codes.astype(np.float32).astype(dtype)
        made[name + "_scale_inv"] = scale
    return made, {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}


def mxfp4():
    made = {}
    for name, weight in experts().items():
        n, k = weight.shape
        made[name.replace(".weight", ".weight_packed")] = weight.view(U8)[:, : k // 2].copy()
        made[name + "_scale"] = np.full((n, k // 32), 127, U8)
    return made, {}


def packed(form):
    """Zeros in a format of ``forms``; a stored shape would have to be right."""
    made = forms.stored(experts(), form, [".experts."])
    made = {n: a for n, a in made.items() if not n.endswith("weight_shape")}
    return made, {"quantization_config": forms.QUANTIZATION[form]}


def fused(**form):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"EXPERTS": 3, "LAYERS": 1, "SIZE": SIZE, "HIDDEN": HIDDEN}.items():
            patched.setattr(checkpoints, name, value)
        return fuse(experts(), **form), {"model_type": "qwen3_vl_moe_text"}


def plain(dtype):
    return {n: a.astype(dtype) for n, a in experts().items()}, {}


def embedding():
    return {**experts(), "model.embed_tokens.weight": np.zeros((10_000, HIDDEN), BF16)}, {}


FORMS = {
    "bf16": (lambda: plain(BF16), {}),
    "fp16": (lambda: plain(np.float16), {}),
    "fp32": (lambda: plain(np.float32), {}),
    "two steps": (lambda: plain(BF16), {"layout": TwoSteps(threadpool_count=1)}),
    "groups": (
        lambda: plain(BF16), {"layout": CompressedTensors(), "quantize": Int4(group_size=32, symmetric=False)}
    ),
    "words of bytes": (lambda: plain(BF16), {"layout": CompressedTensors()}),
    "words of bytes, groups": (lambda: plain(BF16), {"layout": CompressedTensors(), "quantize": Int8(group_size=32)}),
    "fp8 blocks": (lambda: fp8((128, 128)), {}),
    "fp8 rows": (lambda: fp8((1, HIDDEN)), {"quantize": None, "layout": None}),
    "fp8 to bf16": (lambda: fp8((128, 128)), {"quantize": None, "layout": None}),
    "mxfp4": (mxfp4, {}),
    "gptq": (lambda: packed("gptq"), {}),
    "awq": (lambda: packed("awq"), {}),
    "compressed-tensors": (lambda: packed("compressed-tensors"), {}),
    "fused": (fused, {"preprocess": [SplitExperts(), MoeToBf16()]}),
    "fused transposed": (lambda: fused(transposed=True), {"preprocess": [SplitExperts(), MoeToBf16()]}),
    "fused interleaved": (
        lambda: fused(transposed=True, interleaved=True),
        {"preprocess": [SplitExperts(gate_up="interleaved"), MoeToBf16()]},
    ),
    "fused interleaved, read whole": (
        lambda: fused(transposed=True, interleaved=True),
        {"preprocess": [SplitExperts(gate_up="interleaved"), MoeToBf16()], "loader": WholeLoader},
    ),
    "embedding": (embedding, {}),
}  # fmt: skip


def peak(plan) -> int:
    """Bytes that Python and numpy allocated at most during a run; with pread, source tensors are among them."""
    tracemalloc.start()
    try:
        execute(plan, REGISTRY.hook, workers=1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMS)
def test_a_run_stays_below_its_bound(tmp_path, form):
    make, stages = FORMS[form]
    data, changes = make()
    model = checkpoints.config(
        **{"moe_intermediate_size": SIZE, "hidden_size": HIDDEN, "num_experts": 3, "num_hidden_layers": 1, **changes}
    )  # fmt: skip
    folder = checkpoints.write(tmp_path / "model", data, model)
    defaults = {"preprocess": [MoeToBf16()], "quantize": Int8(), "layout": KtAmx(threadpool_count=1)}
    defaults |= {"writer": SafetensorsWriter(path=tmp_path / "out"), "loader": SafetensorsLoader}
    stages = {**defaults, **stages}
    plan = Pipeline(**{**stages, "loader": stages["loader"](path=folder, io="pread")}).plan()
    assert plan.problems == ()
    bound, most = plan.peak_memory(1), peak(plan)
    assert most <= bound + SLACK, f"{most:,} bytes of {bound:,}"
    assert bound <= 2 * most, f"{bound:,} bytes are far above {most:,}"
    if form in ("fused", "fused transposed", "fused interleaved"):
        assert most < plan.source_bytes, "more than an expert was in memory"


def test_a_rule_that_makes_more_of_one_expert_is_in_the_bound(tmp_path):
    data, changes = fused()
    model = checkpoints.config(
        **{"moe_intermediate_size": SIZE, "hidden_size": HIDDEN, "num_experts": 3, "num_hidden_layers": 1, **changes}
    )
    plans = [
        Pipeline(
            loader=MemoryLoader(tensors=data, model=model), preprocess=[SplitExperts()], quantize=Int4(group_size=32),
            layout=CompressedTensors(), writer=MemoryWriter(),
            rules=[Rule(match=f"*.experts.{e}.*", quantizer=Int8(group_size=32)) for e in experts],
        ).plan()
        for experts in ((), (0,), (1,), (2,))
    ]  # fmt: skip
    without, *changed = (plan.peak_memory(1) for plan in plans)
    assert changed == [changed[0]] * 3 and changed[0] - without == 3 * SIZE * HIDDEN // 2


@pytest.mark.parametrize("layout", [KtAmx(threadpool_count=2), CompressedTensors()])
def test_reading_back_stays_below_its_bound(tmp_path, layout):
    model = checkpoints.config(
        moe_intermediate_size=SIZE, hidden_size=HIDDEN, num_experts=3, num_hidden_layers=1
    )  # fmt: skip
    folder = checkpoints.write(tmp_path / "model", experts(), model)
    Pipeline(
        loader=SafetensorsLoader(path=folder), preprocess=[MoeToBf16()], quantize=Int4(), layout=layout,
        writer=SafetensorsWriter(path=tmp_path / "packed"),
    ).run()  # fmt: skip
    plan = dequantize_pipeline(tmp_path / "packed", tmp_path / "out", REGISTRY).plan()
    bound, most = plan.peak_memory(1), peak(plan)
    packed = plan.pipeline.loader.inner
    mapped = max(t.nbytes for t in packed.scan())
    assert most <= bound + SLACK and bound <= 1.6 * (most + mapped), f"{most:,} bytes of {bound:,}"


def test_pages_of_a_bin_file_are_released(tmp_path):
    """Resident pages of the mapping, from the kernel's own list."""
    import torch

    folder = checkpoints.write(tmp_path / "model", {}, checkpoints.config())
    state = {f"x{i}": torch.full((2_000_000,), i, dtype=torch.int32) for i in range(4)}
    state["strided"] = torch.arange(4_000_000, dtype=torch.int32).reshape(2000, 2000)[:, ::2]
    state["numpy"] = torch.arange(3.0)
    torch.save(state, folder / "pytorch_model.bin")
    loader = BinLoader(path=folder)
    specs = {s.name: s for s in loader.scan()}
    assert loader.scratch_bytes(specs["strided"]) == specs["strided"].nbytes and loader.scratch_bytes(specs["x1"]) == 0

    def resident():
        entries = Path("/proc/self/smaps").read_text().split("pytorch_model.bin\n")[1:]
        return sum(int(e.split("Rss:")[1].split()[0]) * 1024 for e in entries)

    for i in range(4):
        array = loader.read(specs[f"x{i}"])
        assert (array == i).all() and resident() >= array.nbytes
        loader.release(specs[f"x{i}"])
        assert resident() < 1_000_000
        assert (array == i).all(), "a view has its pages back when it is read"
        loader.release(specs[f"x{i}"])
    rows = loader.rows(specs["strided"], 500, 502)
    want = state["strided"].numpy()
    assert np.array_equal(loader.read(rows), want[500:502])
    assert np.array_equal(loader.read(specs["strided"]), want)
    for name in ("strided", "numpy"):
        loader.release(specs[name])
    loader.release(rows)
    assert resident() < 1_000_000
