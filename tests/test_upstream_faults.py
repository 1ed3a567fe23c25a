"""Faults of upstream's converter, each shown not to be ours."""

import json

import checkpoints
import numpy as np
import pytest
import reference
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, KtFolderWriter, MoeToBf16, SafetensorsWriter

from ktforge import CheckpointError, Pipeline, PlanError, PluginError
from ktforge.disk.marks import PARTIAL


def pipeline(source, out, writer=SafetensorsWriter, **preprocess):
    return Pipeline(
        loader=AutoLoader(path=source), preprocess=[MoeToBf16(**preprocess)], quantize=Int8(),
        layout=KtAmx(threadpool_count=2), writer=writer(path=out),
    )  # fmt: skip


@pytest.mark.parametrize("block", [(128, 128), (96, 80), (512, 256)])
def test_fp8_scales_do_not_shift_across_experts(tmp_path, out, block):
    """Upstream flattens 64 experts, so rows that are not a multiple of the block shift every later expert's scales;
    and it reads ``weight_block_size`` only to ignore it."""
    source = checkpoints.fp8_checkpoint(tmp_path / "fp8", block)
    pipeline(source, out).run()
    before, made = checkpoints.load_output(source), checkpoints.load_output(out)
    for number in range(checkpoints.EXPERTS):
        weights = {}
        for projection in ("gate", "up", "down"):
            name = checkpoints.expert_name(1, number, projection)
            weight, scale = before[name].astype(np.float32), before[name + "_scale_inv"]
            weights[projection] = (weight * checkpoints.spread(scale, block, weight.shape)).astype(checkpoints.BF16)
        for name, array in reference.packed_expert(1, number, weights, 8, 2).items():
            assert made[name].tobytes() == array.tobytes(), name


def test_the_declared_input_type_is_not_trusted(source, out):
    with pytest.raises(PlanError, match="given as fp8, but gate, up, down are BF16"):
        pipeline(source, out, input_type="fp8").run()


def test_no_experts_is_no_success(tmp_path, out):
    data = {n: a for n, a in checkpoints.tensors().items() if ".experts." not in n}
    source = checkpoints.write(tmp_path / "none", data, checkpoints.config())
    with pytest.raises(CheckpointError, match="announces 4 experts"):
        pipeline(source, out).run()
    assert not out.exists()


def test_a_broken_shard_is_not_skipped(tmp_path, out):
    source = checkpoints.write(tmp_path / "broken", checkpoints.tensors(), checkpoints.config(), 3)
    shard = source / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is not a whole"):
        pipeline(source, out).run()


def test_total_size_is_the_truth(source, out):
    pipeline(source, out).run()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in checkpoints.load_output(out).values())


def test_quantization_config_does_not_survive(tmp_path, out):
    source = checkpoints.fp8_checkpoint(tmp_path / "fp8", (128, 128))
    pipeline(source, out).run()
    made = json.loads((out / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    said = made.pop("quantization_config")
    assert said["format"].startswith("kt-amx-") and "quant_method" not in said and made.pop("amx_quantization")
    assert before.pop("quantization_config") != said and made == before


def test_every_side_file_is_carried(source, out):
    pipeline(source, out).run()
    assert all((out / name).read_text() == text for name, text in checkpoints.SIDE_FILES.items())


def test_the_numa_count_is_recorded(source, out):
    pipeline(source, out).run()
    assert json.loads((out / "ktforge_manifest.json").read_text())["numa_nodes"] == 2


@pytest.mark.parametrize("lost", ["numa.1.weight", "ffn_down_exps.3.numa.0.scale"])
def test_a_missing_part_is_an_error(source, out, lost):
    """Upstream warns; the runtime then cuts the layer short in silence."""

    class Forgets(KtFolderWriter):
        def open(self, plan, **options):
            opened = super().open(plan, **options)

            class Sink:
                def __enter__(self):
                    self.sink = opened.__enter__()
                    return self

                def __exit__(self, *error):
                    return opened.__exit__(*error)

                def has(self, tensor):
                    return self.sink.has(tensor)

                def write(self, tensor, data, row=None):
                    if lost not in tensor.name:
                        self.sink.write(tensor, data, row)

            return Sink()

    with pytest.raises(PluginError, match=f"{lost}.* was planned but never written"):
        pipeline(source, out, Forgets).run()
    assert [p.name for p in out.iterdir()] == [PARTIAL]


def test_alignment_is_one_line_of_the_plan(tmp_path, out):
    """Upstream aborts in C++ after minutes where (I / T) % 128 is not 0."""
    model = checkpoints.config(moe_intermediate_size=768)
    shapes = {"gate": (768, 256), "up": (768, 256), "down": (256, 768)}
    data = {
        checkpoints.expert_name(layer, number, p): np.ones(shape, checkpoints.BF16)
        for layer in range(2) for number in range(4) for p, shape in shapes.items()
    }  # fmt: skip
    source = checkpoints.write(tmp_path / "odd", data, model)
    changed = pipeline(source, out).model_copy(update={"quantize": Int4(), "layout": KtAmx(threadpool_count=4)})
    (problem,) = changed.plan().problems
    assert problem.endswith("counts that fit: 1, 2, 3, 6")
