"""Whole conversions, compared tensor by tensor with the independent NumPy statement."""

import json

import checkpoints
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from ktforge_plugins import Int4, Int8, KtAmx, KtFolderWriter, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.writers.kt_folder import _METHODS
from safetensors import safe_open

from ktforge import CheckpointError, Pipeline, PluginError, TensorSpec
from ktforge.testing import MemoryLoader, MemoryWriter, check_layout, expert

QUANTIZERS = {4: Int4(), 8: Int8()}


def expected(data, bits, parts):
    """All packed tensors of the Qwen3-MoE in ``data``."""
    out = {}
    for layer in range(checkpoints.LAYERS):
        for number in range(checkpoints.EXPERTS):
            weights = {p: data[checkpoints.expert_name(layer, number, p)] for p in ("gate", "up", "down")}
            out.update(reference.packed_expert(layer, number, weights, bits, parts))
    return out


def same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_whole_checkpoint(source, out, isa, bits, parts):
    Pipeline(
        loader=SafetensorsLoader(path=source), preprocess=[MoeToBf16()], quantize=QUANTIZERS[bits],
        layout=KtAmx(threadpool_count=parts), writer=SafetensorsWriter(path=out, max_shard_size="700KB"),
    ).run()  # fmt: skip
    made, data = checkpoints.load_output(out), checkpoints.tensors()
    same({n: a for n, a in made.items() if "_exps." in n}, expected(data, bits, parts))
    for name, array in data.items():
        if ".experts." not in name:
            renamed = name.replace("model.layers.", "blk.").removeprefix("model.")
            assert made[renamed].tobytes() == array.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_folder_of_kt_files(source, out, bits):
    Pipeline(
        loader=SafetensorsLoader(path=source), quantize=QUANTIZERS[bits], layout=KtAmx(threadpool_count=2),
        writer=KtFolderWriter(path=out),
    ).run()  # fmt: skip
    want = {}
    for name, array in expected(checkpoints.tensors(), bits, 2).items():
        _, layer, projection, number, _, part, kind = name.split(".")
        kind = {"weight": "quant", "scale": "scale"}[kind]
        file = f"INT{bits}_{projection.split('_')[1]}_{number}_{array.nbytes}Byte_{kind}_.kt"
        want[f"_layer_{layer}/_numa_{part}/{file}"] = array.tobytes()
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.kt")} == want
    assert "norm.weight" in checkpoints.load_output(out)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 6), cols=st.integers(1, 6), parts=st.sampled_from([1, 2, 4]), bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_shape_that_divides(rows, cols, parts, bits, seed):
    unit = expert((128 * rows * parts, 128 * cols), seed)
    packed = check_layout(KtAmx(threadpool_count=parts), QUANTIZERS[bits], unit)
    weights = {role.removesuffix(".weight"): array for role, array in unit.tensors.items()}
    same(packed, reference.packed_expert(0, 0, weights, bits, parts))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe",
                                    "minimax", "minimax_m2", "olmoe"])  # fmt: skip
def test_every_family_end_to_end(family):
    model, keys = checkpoints.architectures()[family]
    random = np.random.default_rng(1)
    dtypes = {"BF16": checkpoints.BF16, "F32": np.dtype(np.float32)}
    data = {n: random.standard_normal(s, np.float32).astype(dtypes[d]) for n, (d, s) in keys.items()}
    writer = MemoryWriter()
    Pipeline(
        loader=MemoryLoader(tensors=data, model=model), preprocess=[MoeToBf16()], quantize=Int4(), layout=KtAmx(),
        writer=writer,
    ).run()  # fmt: skip
    words = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
    experts: dict = {}
    for name, array in data.items():
        if ".experts." in name:
            _, _, layer, _, _, number, word, _ = name.split(".")
            experts.setdefault((int(layer), int(number)), {})[words[word]] = array
    want = {}
    for (layer, number), weights in experts.items():
        want.update(reference.packed_expert(layer, number, weights, 4, 2))
    same({n: a for n, a in writer.tensors.items() if "_exps." in n}, want)
    others = [n for n in data if ".experts." not in n]
    assert len(writer.tensors) == len(want) + len(others)


@pytest.mark.parametrize(("base", "low", "most"), [(Int4, -8, 7), (Int8, -128, 127)])
def test_a_code_that_kernels_compute_wrongly_is_refused(base, low, most):
    class Full(base):
        """Of the whole range, as another package's quantizer may be."""

        def quantize(self, unit, spec):
            made = super().quantize(unit, spec)
            made.parts[-1].codes[3, 5] = low
            return made

    pipeline = Pipeline(
        loader=MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config()), quantize=Full(),
        layout=KtAmx(), writer=MemoryWriter(),
    )  # fmt: skip
    with pytest.raises(PluginError) as caught:
        pipeline.run(workers=1)
    assert caught.value.problems == (
        f"model.layers.0.mlp.experts.0.down_proj.weight: the quantizer (method absmax-{base.name}/2) made the code "
        f"{low}; kt-amx takes {base.name} codes from {-most} to {most}, since kt-kernel up to 0.7.0 computes {low} "
        f"wrongly on AVX-512: have the quantizer clamp at {-most}",
    )


def test_every_tensor_is_aligned_to_its_element(source, out):
    Pipeline(
        loader=SafetensorsLoader(path=source), quantize=Int4(), layout=KtAmx(), writer=SafetensorsWriter(path=out)
    ).run()
    raw = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    sizes = {"F32": 4, "BF16": 2, "I8": 1}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0, name
    with safe_open(out / "model.safetensors", framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_kt_folder_knows_every_format_of_the_layout():
    unit = expert().spec
    layout = KtAmx(threadpool_count=1)
    formats = {layout.plan(q.plan(unit, layout.demand(unit))).format for q in QUANTIZERS.values()}
    assert formats == _METHODS.keys()


def test_kt_folder_refuses_what_is_not_packed(source, out):
    pipeline = Pipeline(loader=SafetensorsLoader(path=source), writer=KtFolderWriter(path=out))
    assert pipeline.plan().problems == ("kt-folder holds packed experts of one kt-amx format, not unquantised ones",)


@pytest.mark.parametrize(
    ("number", "size", "message"),
    [
        (999_999, 512, "is called numa.999999; 64 parts are the most"),
        (0, 10**6, "in 4 or 8 bits: see config.json"),
    ],
)
def test_packed_names_and_sizes_that_are_none_are_refused_at_once(number, size, message):
    """A number in a stranger's file decides about no loop."""
    name = f"blk.0.ffn_gate_exps.0.numa.{number}.weight"
    config = checkpoints.config(moe_intermediate_size=size)
    tensors = {name: TensorSpec(name, np.dtype(np.int8), (512 * 128,))}
    with pytest.raises(CheckpointError, match=message):
        list(KtAmx().find(tensors, config, lambda spec: np.empty(0)))
