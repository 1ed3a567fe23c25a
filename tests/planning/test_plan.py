"""Everything that can be refused is refused by the plan, in one go and with the mend."""

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, Int8, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import Pipeline, PlanError
from ktforge.testing import MemoryLoader, MemoryWriter

TO_BF16 = (MoeToBf16(),)


def plan(data=None, model=None, *, quantize=None, parts=1, preprocess=TO_BF16, **layout):
    loader = MemoryLoader(
        tensors=checkpoints.tensors() if data is None else data, model=model or checkpoints.config()
    )  # fmt: skip
    return Pipeline(
        loader=loader, preprocess=preprocess, quantize=quantize or Int4(),
        layout=KtAmx(threadpool_count=parts, **layout), writer=MemoryWriter(),
    ).plan()  # fmt: skip


def test_nothing_to_write_is_refused(tmp_path):
    """A safetensors file may hold no tensor."""
    folder = checkpoints.write(
        tmp_path / "model", {}, {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 1}
    )
    made = Pipeline(loader=SafetensorsLoader(path=folder), writer=SafetensorsWriter(path=tmp_path / "out"))
    assert made.plan().problems == ("the checkpoint has no tensor to write: nothing would be in the output",)


def test_a_plan_knows_every_tensor_and_size(source, out):
    pipeline = Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Int4(), layout=KtAmx(threadpool_count=2),
        writer=SafetensorsWriter(path=out, max_shard_size="500KB"),
    )  # fmt: skip
    planned = pipeline.plan()
    assert planned.problems == ()
    assert planned.expert_units == checkpoints.LAYERS * checkpoints.EXPERTS
    pipeline.run()
    assert {f.path: f.nbytes for f in planned.files} == {
        p.name: p.stat().st_size for p in out.glob("*.safetensors")
    }  # fmt: skip
    assert len(planned.files) > 3
    names = {t.name for f in planned.files for t in f.tensors}
    assert names == checkpoints.load_output(out).keys()


@pytest.mark.parametrize(
    ("size", "hidden", "quantize", "parts", "message"),
    [
        (768, 256, Int4(), 4, "threadpool_count 4 .* 768 into multiples of 128, .* counts that fit: 1, 2, 3, 6$"),
        (768, 256, Int8(), 5, "threadpool_count 5 .* 768 into multiples of 64, .* counts that fit: 1, 2, 3, 4, 6, 12$"),
        (192, 256, Int4(), 1, "threadpool_count 1 .* no count fits"),
        (256, 192, Int4(), 1, "hidden size 192 is not a multiple of 128"),
        (256, 96, Int8(), 2, "hidden size 96 is not a multiple of 64"),
    ],
)
def test_alignment_is_refused_with_the_counts_that_fit(size, hidden, quantize, parts, message):
    model = checkpoints.config(moe_intermediate_size=size, hidden_size=hidden)
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    data = {
        checkpoints.expert_name(layer, expert, p): np.zeros(shapes[p], checkpoints.BF16)
        for layer in range(2) for expert in range(4) for p in shapes
    }  # fmt: skip
    problems = plan(data, model, quantize=quantize, parts=parts).problems
    assert len(problems) == 1, "one line for all eight experts"
    with pytest.raises(PlanError, match=message):
        raise PlanError(*problems)
    assert problems[0].startswith("model.layers.0.mlp.experts.0 (and 7 more): ")


def test_every_refusal_comes_at_once():
    data = checkpoints.tensors()
    del data[checkpoints.expert_name(0, 1, "up")]
    data[checkpoints.expert_name(1, 3, "down")] = np.zeros((8, 8), checkpoints.BF16)
    data[checkpoints.expert_name(1, 0, "gate")] = data[checkpoints.expert_name(1, 0, "gate")].astype(np.float64)
    problems = "\n".join(plan(data, checkpoints.config(num_experts=5)).problems)
    assert "experts.1: has no up projection" in problems
    assert "experts.3: down is BF16 [8, 8], but config.json says [256, 512]" in problems
    assert "experts.0: gate is stored as F64, which moe-to-bf16 does not read; " in problems
    assert "layer 0: expert 4 missing" in problems


def test_a_refused_plan_does_not_run(out):
    loader = MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config(num_experts=5))
    writer = SafetensorsWriter(path=out)
    with pytest.raises(PlanError, match="expert 4 missing"):
        Pipeline(loader=loader, quantize=Int4(), layout=KtAmx(), writer=writer).run()
    assert not out.exists()


def test_experts_that_are_not_bf16_need_the_preprocessor():
    data = {n: a.astype(np.float16) for n, a in checkpoints.tensors().items()}
    assert "gate is F16; int4 takes BF16: put moe-to-bf16 under preprocess" in plan(data, preprocess=()).problems[0]


def test_an_expert_bias_has_no_place():
    data = checkpoints.tensors()
    data["model.layers.0.mlp.experts.0.gate_proj.bias"] = np.zeros(512, checkpoints.BF16)
    assert "kt-amx has no place for the biases of gate: `ktforge moe-to-bf16` keeps them" in plan(data).problems[0]


def test_names_that_would_collide_name_both():
    data = checkpoints.tensors()
    data["blk.0.input_layernorm.weight"] = np.zeros(4, checkpoints.BF16)
    (problem,) = plan(data).problems
    assert problem == (
        "blk.0.input_layernorm.weight and model.layers.0.input_layernorm.weight would both be called "
        "blk.0.input_layernorm.weight"
    )


@pytest.mark.parametrize(
    ("choice", "name"),
    [("rename", "blk.0.input_layernorm.weight"), ("keep", "model.layers.0.input_layernorm.weight"), ("omit", None)],
)
def test_non_experts(choice, name):
    planned = plan(non_experts=choice)
    outputs = {t.name for f in planned.files for t in f.tensors}
    others = {n for n in outputs if "_exps." not in n}
    assert (name in others) if name else not others
    assert ("embed_tokens.weight" in others) == (choice == "rename")
    assert len(planned.left_out) == (0 if name else 21)


def test_layers_beyond_the_model_are_left_out_and_listed():
    data = checkpoints.tensors()
    extra = {n.replace("layers.1.", "layers.2."): a for n, a in data.items() if "layers.1." in n}
    planned = plan({**data, **extra})
    assert planned.problems == ()
    assert {t.name for t in planned.left_out} == extra.keys()
    assert not any("blk.2." in t.name for f in planned.files for t in f.tensors)


def prediction_heads():
    return {n.replace("layers.1.", "layers.2."): a for n, a in checkpoints.tensors().items() if "layers.1." in n}


@pytest.mark.parametrize(("mtp", "layout", "kept"), [
    (None, True, False), (None, False, True), ("keep", True, True), ("keep", False, True), ("omit", False, False),
])  # fmt: skip
def test_prediction_heads_are_kept_or_left_out_whole(mtp, layout, kept):
    extra = prediction_heads()
    loader = MemoryLoader(tensors={**checkpoints.tensors(), **extra}, model=checkpoints.config())
    stages = {"quantize": Int4(), "layout": KtAmx(threadpool_count=1, non_experts="keep")} if layout else {}
    planned = Pipeline(loader=loader, writer=MemoryWriter(), mtp=mtp, **stages).plan()
    assert planned.problems == ()
    assert {t.name for t in planned.left_out} == (set() if kept else extra.keys())
    names = {t.name for f in planned.files for t in f.tensors}
    beyond = sum("blk.2." in n or "layers.2." in n for n in names)
    # Packed, each projection of the 4 experts is a weight and a scale; the other 9 tensors keep their names.
    assert beyond == (0 if not kept else 9 + 4 * 3 * 2 if layout else len(extra))


def test_a_full_disk_is_refused_before_the_first_byte(source, out, monkeypatch):
    from collections import namedtuple

    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "total used free")(10**6, 0, 1000))
    writer = SafetensorsWriter(path=out)
    pipeline = Pipeline(loader=SafetensorsLoader(path=source), quantize=Int4(), layout=KtAmx(), writer=writer)
    (problem,) = pipeline.plan().problems
    assert "only 1.00 kB are free" in problem and "make room or write elsewhere" in problem


def test_peak_memory_is_that_of_the_largest_units_in_flight():
    planned = plan()
    one, two = planned.peak_memory(1), planned.peak_memory(2)
    weights = 3 * checkpoints.SIZE * checkpoints.HIDDEN
    assert one == weights * 2 + weights // 2 + 4 * (2 * checkpoints.SIZE + checkpoints.HIDDEN)
    assert two == 2 * one


def test_peak_memory_of_two_steps_counts_codes_and_scales():
    class TwoSteps(KtAmx):
        def fused(self, quantizer, spec):
            return None

    weights = 3 * checkpoints.SIZE * checkpoints.HIDDEN
    long = plan()
    pipeline = long.pipeline.model_copy(update={"layout": TwoSteps(threadpool_count=1)})
    scales = (4 + 4) * (2 * checkpoints.SIZE + checkpoints.HIDDEN)  # as they are computed, and as they are stored
    assert pipeline.plan().peak_memory(1) == long.peak_memory(1) + weights + scales
