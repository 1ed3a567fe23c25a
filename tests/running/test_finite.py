"""NaN and infinity are refused wherever weights are converted, by tensor and place, and passed by elsewhere."""

import tracemalloc
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from checkpoints import BF16
from ktforge_plugins import CompressedTensors, Fp8, Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter

from ktforge import CheckpointError, Pipeline, Registry, native
from ktforge.contract.finite import is_finite
from ktforge.pipeline.presets import dequantize_pipeline
from ktforge.testing import MemoryLoader, MemoryWriter

NAME = checkpoints.expert_name(1, 2, "down")


def to_bf16(folder, data, stage=None, **config):
    source = checkpoints.write(folder, data, checkpoints.config(**config))
    writer = MemoryWriter()
    Pipeline(loader=SafetensorsLoader(path=source), preprocess=[stage or MoeToBf16()], writer=writer).run()
    return writer.tensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_every_bit_pattern_counts(dtype, value):
    array = np.linspace(-3, 3, 101).astype(dtype)
    assert is_finite(array)
    array[50] = np.finfo(np.float32).tiny if dtype is np.float32 else -0.0
    assert is_finite(array)
    array[50] = value
    assert not is_finite(array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_moe_to_bf16(tmp_path, dtype, value):
    data = {n: a.astype(dtype) if ".experts." in n else a for n, a in checkpoints.tensors().items()}
    data[NAME][7, 300] = value
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {NAME} is NaN or infinite at row 7, column 300"):
        to_bf16(tmp_path / "m", data)


def test_a_number_that_float32_holds_and_bf16_does_not(tmp_path):
    data = {n: a.astype(np.float32) if ".experts." in n else a for n, a in checkpoints.tensors().items()}
    data[NAME][7, 300] = np.finfo(np.float32).max
    with pytest.raises(
        CheckpointError, match=r"row 7, column 300.*or above 3.39e38, the largest number that BF16 holds"
    ):
        to_bf16(tmp_path / "m", data)


def test_fused_experts_whose_rows_are_worked_on_one_by_one(tmp_path):
    data = checkpoints.tensors()
    data[NAME][7, 300] = np.nan
    said = r"model\.layers\.1\.mlp\.experts\.down_proj is NaN or infinite at expert 2, row 7, column 300"
    with pytest.raises(CheckpointError, match=said):
        to_bf16(tmp_path / "m", checkpoints.fuse(data), model_type="qwen3_5_moe_text")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_of_fp8(tmp_path, value):
    source = checkpoints.fp8_checkpoint(tmp_path / "m", (128, 128), attention=True)
    data = checkpoints.load_output(source)
    name = "model.layers.0.self_attn.q_proj.weight"
    data[f"{name}_scale_inv"][1, 0] = value
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(CheckpointError, match=f"{name} is NaN or infinite at row 128, column 0"):
        to_bf16(tmp_path / "wrong", data, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=f"{name} is NaN or infinite at row 128, column 0"):
        to_bf16(tmp_path / "wrong", data, Fp8(), quantization_config=quantization)


def test_what_is_no_weight_of_theirs_may_be_infinite(tmp_path):
    data = checkpoints.tensors() | {"model.layers.0.attention_mask": np.full((2, 2), -np.inf, BF16)}
    assert to_bf16(tmp_path / "m", data)["model.layers.0.attention_mask"].astype(np.float32)[0, 0] == -np.inf


@pytest.mark.parametrize(
    ("layout", "quantizer", "scale"),
    [(KtAmx(), Int4(), "blk.1.ffn_down_exps.2.numa.0.scale"),
     (CompressedTensors(), Int4(group_size=32), NAME.replace("weight", "weight_scale"))],
)  # fmt: skip
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_dequantize_looks_at_scales(source, tmp_path, layout, quantizer, scale, value):
    packed = tmp_path / "packed"
    loader, writer = SafetensorsLoader(path=source), SafetensorsWriter(path=packed)
    Pipeline(loader=loader, quantize=quantizer, layout=layout, writer=writer).run()
    (file,) = packed.glob("*.safetensors")
    raw, spec = bytearray(file.read_bytes()), next(s for s in SafetensorsLoader(path=packed).scan() if s.name == scale)
    place = spec.offset + 7 * spec.nbytes // spec.shape[0]
    raw[place : place + spec.dtype.itemsize] = np.array([value]).astype(spec.dtype).tobytes()
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{file}: {NAME} is NaN or infinite at row 7, column \d+, or above"):
        dequantize_pipeline(packed, tmp_path / "back", Registry.installed()).run()
    assert not (tmp_path / "back" / "config.json").exists()


def test_looking_takes_no_memory():
    """A copy of the tensor would not be in what the plan says that a unit needs."""
    array = native.to_bf16(np.ones((1024, 1024), np.float32))
    tracemalloc.start()
    assert is_finite(array)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


class TwoSteps(KtAmx):
    name: ClassVar[str] = "two-steps"

    def fused(self, quantizer, spec):
        return None


@pytest.mark.parametrize("layout", [KtAmx, TwoSteps])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("place", [(0, 0), (255, 128), (256, 127), (511, 255), (400, 130)])
def test_a_place_in_a_part_is_told_as_that_in_the_weight(layout, projection, place):
    """The second part begins at row 256 of gate and up, and at column 256 of down."""
    place = place[::-1] if projection == "down" else place
    data = {n: np.ones_like(a) for n, a in checkpoints.tensors().items()}
    name = checkpoints.expert_name(1, 3, projection)
    data[name][place] = np.inf
    loader = MemoryLoader(tensors=data, model=checkpoints.config())
    made = Pipeline(loader=loader, quantize=Int4(), layout=layout(threadpool_count=2), writer=MemoryWriter())
    with pytest.raises(
        CheckpointError, match=rf"{name} is NaN or infinite at row {place[0]}, column {place[1]}, or above"
    ):
        made.run()
