"""AMXINT4 and AMXINT8 in KTransformers' own kernels: what they pack, and what they compute with our files."""

import checkpoints
import numpy as np
import pytest
import reference
import torch
from ktforge_plugins import AutoLoader, Int4, Int8, KtAmx, KtFolderWriter, SafetensorsWriter
from runtime.layers import MAPPING, error_of, rounded

from ktforge import Pipeline

pytestmark = pytest.mark.runtime
METHODS = [("AMXINT4", Int4()), ("AMXINT8", Int8())]


@pytest.fixture(autouse=True)
def cpu():
    """Skips where kt-kernel has no kernels for these methods."""
    import kt_kernel
    from kt_kernel.utils import amx

    if amx.AMXInt4_MOE is None or amx.AMXInt8_MOE is None:
        variant = kt_kernel.__cpu_variant__
        pytest.skip(f"AMXINT4 and AMXINT8 need a CPU with AVX-512 or AMX; kt-kernel chose its variant {variant} here")


def converted(source, writer, quantizer):
    Pipeline(loader=AutoLoader(path=source), quantize=quantizer, layout=KtAmx(threadpool_count=1), writer=writer).run()
    return writer.path


@pytest.mark.parametrize(("method", "quantizer"), METHODS)
def test_kt_kernel_packs_the_same_files(source, out, tmp_path, wrapper, method, quantizer):
    ours = converted(source, KtFolderWriter(path=out), quantizer)
    data, theirs = checkpoints.tensors(), tmp_path / "theirs"
    theirs.mkdir()
    stacked = [
        torch.stack([
            checkpoints.as_torch(data[checkpoints.expert_name(1, expert, p)]) for expert in range(checkpoints.EXPERTS)
        ]) for p in ("gate", "up", "down")
    ]  # fmt: skip
    wrapper(method, theirs).load_weights_from_tensors(*stacked, MAPPING)
    written, wanted = ({p.name: p.read_bytes() for p in (f / "_layer_1").rglob("*.kt")} for f in (theirs, ours))
    assert len(wanted) == 6 * checkpoints.EXPERTS and written == wanted


@pytest.mark.parametrize(("method", "quantizer"), METHODS)
def test_the_kernels_compute_what_the_dequantised_experts_do(source, out, wrapper, method, quantizer):
    loaded = wrapper(method, converted(source, SafetensorsWriter(path=out), quantizer))
    loaded.load_weights(MAPPING)
    data = checkpoints.tensors()

    def dequantised(expert, projection):
        weight = data[checkpoints.expert_name(1, expert, projection)]
        codes, scales = reference.quantise(weight, quantizer.bits)
        step = 16 if quantizer.bits == 4 else 1
        return torch.from_numpy(codes.astype(np.float32) * step * scales[:, None])

    exact, integers = error_of(loaded, dequantised), error_of(loaded, dequantised, rounded)
    print(f"{method}: {exact:.4f} from the dequantised experts, {integers:.4f} with activations in int8")
    assert exact < 0.03 and integers < 0.015
