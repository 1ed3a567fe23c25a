"""The figures that pages give of large models are those of plans from such models' headers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsWriter, SplitExperts

from ktforge import Loader, Pipeline, TensorSpec
from ktforge.contract.stages import alike
from ktforge.contract.tensors import BF16, F8_E4M3, F32
from ktforge.text import size_text

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", *(f"docs/{n}.md" for n in (
    "index", "faq", "tutorial", "how-to/small-disk", "how-to/deepseek-fp8")))}  # fmt: skip
GATED = ("gate_proj", "up_proj", "down_proj")


class Headers(Loader):
    """A checkpoint without data: tensors by name, each a dtype and a shape."""

    name: ClassVar[str] = "headers"
    tensors: dict[str, tuple[Any, tuple[int, ...]]]
    model: dict[str, Any]

    def scan(self) -> Iterator[TensorSpec]:
        return (TensorSpec(name, dtype, shape) for name, (dtype, shape) in self.tensors.items())

    def read(self, spec: TensorSpec) -> np.ndarray:
        raise AssertionError("a plan reads no data")

    def config(self) -> Mapping[str, Any]:
        return self.model

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return spec.rows(start, stop)

    def plan_key(self):
        return alike


def planned(tmp_path, tensors, model, **layout):
    return Pipeline(
        loader=Headers(tensors=tensors, model=model), preprocess=[SplitExperts(), MoeToBf16()], quantize=Int4(),
        layout=KtAmx(**layout), writer=SafetensorsWriter(path=tmp_path / "out"),
    ).plan()  # fmt: skip


def matrix(name, rows, columns, dtype=F8_E4M3):
    """A weight, with the scales of its blocks if it is FP8."""
    tensors = {f"{name}.weight": (dtype, (rows, columns))}
    if dtype == F8_E4M3:
        tensors[f"{name}.weight_scale_inv"] = (F32, (-(-rows // 128), -(-columns // 128)))
    return tensors


def gated(stem, size, hidden, dtype=F8_E4M3):
    shapes = ((size, hidden), (size, hidden), (hidden, size))
    return {
        k: v for name, shape in zip(GATED, shapes, strict=True) for k, v in matrix(stem + name, *shape, dtype).items()
    }


def deepseek_v3():
    tensors = matrix("model.embed_tokens", 129280, 7168, BF16) | matrix("lm_head", 129280, 7168, BF16)
    attention = {
        "q_a_proj": (1536, 7168), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, 7168),
        "kv_b_proj": (32768, 512), "o_proj": (7168, 16384),
    }  # fmt: skip
    for layer in range(61):
        stem = f"model.layers.{layer}"
        for name, shape in attention.items():
            tensors |= matrix(f"{stem}.self_attn.{name}", *shape)
        if layer < 3:
            tensors |= gated(f"{stem}.mlp.", 18432, 7168)
            continue
        tensors |= matrix(f"{stem}.mlp.gate", 256, 7168, BF16) | gated(f"{stem}.mlp.shared_experts.", 2048, 7168)
        for expert in range(256):
            tensors |= gated(f"{stem}.mlp.experts.{expert}.", 2048, 7168)
    return tensors, {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256, "moe_intermediate_size": 2048,
        "hidden_size": 7168, "first_k_dense_replace": 3,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip


def qwen3_30b():
    tensors = matrix("model.embed_tokens", 151936, 2048, BF16) | matrix("lm_head", 151936, 2048, BF16)
    tensors["model.norm.weight"] = (BF16, (2048,))
    attention = {"q_proj": (4096, 2048), "k_proj": (512, 2048), "v_proj": (512, 2048), "o_proj": (2048, 4096)}
    norms = {
        "input_layernorm": 2048,
        "post_attention_layernorm": 2048,
        "self_attn.q_norm": 128,
        "self_attn.k_norm": 128,
    }
    for layer in range(48):
        stem = f"model.layers.{layer}"
        for name, shape in attention.items():
            tensors |= matrix(f"{stem}.self_attn.{name}", *shape, BF16)
        tensors |= {f"{stem}.{name}.weight": (BF16, (size,)) for name, size in norms.items()}
        tensors |= matrix(f"{stem}.mlp.gate", 128, 2048, BF16)
        for expert in range(128):
            tensors |= gated(f"{stem}.mlp.experts.{expert}.", 768, 2048, BF16)
    return tensors, {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "moe_intermediate_size": 768,
        "hidden_size": 2048,
    }  # fmt: skip


def test_of_deepseek_v3(tmp_path):
    tensors, model = deepseek_v3()
    plan = planned(tmp_path, tensors, model)
    experts = sum(tensor.nbytes for file in plan.files for tensor in file.tensors if "_exps." in tensor.name)
    source, output, alone = (f"{n / 1e9:.0f} GB" for n in (plan.source_bytes, plan.output_bytes, experts))
    said = {
        "README.md": (f"{source} of FP8, becomes {output}",),
        "docs/index.md": (f"of {source} of FP8 {output}",),
        "docs/faq.md": (
            f"{source} read and {alone} written",
            f"{plan.peak_memory(2) / 1e9:.1f} GB for DeepSeek-V3 with",
        ),
        "docs/how-to/small-disk.md": (f"the output needs {size_text(plan.output_bytes)}", f"as INT4, {alone} remain"),
        "docs/how-to/deepseek-fp8.md": (f"another {(plan.output_bytes - experts) / 1e9:.0f} GB",),
    }
    assert [text for page, texts in said.items() for text in texts if text not in PAGES[page]] == []
    assert plan.peak_memory(2) < 1e9  # README and the first page


def test_of_qwen3_30b(tmp_path):
    tensors, model = qwen3_30b()
    plan = planned(tmp_path, tensors, model)
    for line in (
        f"units        {len(plan.units):,}, {plan.expert_units:,} of them experts",
        f"source       {size_text(plan.source_bytes)}",
        f"output       {size_text(plan.output_bytes)} in {len(plan.files)} files (kt-amx-int4/1)",
        f"compression  {plan.source_bytes / plan.output_bytes:.2f} : 1",
        f"peak memory  {size_text(plan.peak_memory(16))} for 16 units at once, beside Python's own",
    ):
        assert f"\n{line}\n" in PAGES["docs/tutorial.md"]
    (refusal,) = planned(tmp_path, tensors, model, threadpool_count=4).problems
    assert f"error: {refusal}\n" in PAGES["docs/tutorial.md"]
