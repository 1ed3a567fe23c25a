"""A RAWINT4 folder in KTransformers' own loader and kernels."""

import checkpoints
import numpy as np
import pytest
import reference
import torch
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, SafetensorsWriter
from runtime.layers import MAPPING, error_of

from ktforge import Pipeline

pytestmark = pytest.mark.runtime
GROUP = 32


def dequantised(weight):
    codes, scales, _ = reference.quantise_groups(weight, 4, GROUP, True, narrow=True)
    return torch.from_numpy(codes.astype(np.float32) * np.repeat(scales, GROUP, axis=1))


@pytest.fixture
def packed(source, out):
    Pipeline(
        loader=AutoLoader(path=source), quantize=Int4(group_size=GROUP, narrow_range=True),
        layout=CompressedTensors(),
        writer=SafetensorsWriter(path=out),
    ).run()  # fmt: skip
    return out


def test_the_loader_reads_what_was_packed(packed):
    from kt_kernel.utils.loader import CompressedSafeTensorLoader

    loaded = CompressedSafeTensorLoader(str(packed)).load_experts("model.layers.1")
    data = checkpoints.tensors()
    for projection in ("gate", "up", "down"):
        for expert in range(checkpoints.EXPERTS):
            codes, scales, _ = reference.quantise_groups(
                data[checkpoints.expert_name(1, expert, projection)], 4, GROUP, True, narrow=True
            )  # fmt: skip
            nibbles = (codes.astype(np.int32) + 8).astype(np.uint8)
            want = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            assert np.array_equal(loaded[projection][expert].numpy(), want)
            got = loaded[f"{projection}_scale"][expert]
            assert got.dtype == torch.bfloat16 and np.array_equal(got.float().numpy(), scales)


@pytest.mark.parametrize(("backend", "bound"), [("avx2", 0.01), ("amx", 0.02)])
def test_the_kernel_computes_what_the_dequantised_experts_do(packed, wrapper, monkeypatch, backend, bound):
    """``amx`` is the backend of AVX-512 CPUs, too; its activations have 8 bits."""
    from kt_kernel.utils import amx

    if backend == "amx" and amx.AMXInt4_KGroup_MOE is None:
        pytest.skip("this backend of RAWINT4 needs a CPU with AVX-512 or AMX")
    monkeypatch.setenv("KT_RAWINT4_BACKEND", backend)
    loaded = wrapper("RAWINT4", packed)
    loaded.load_weights(MAPPING)
    data = checkpoints.tensors()
    error = error_of(loaded, lambda expert, p: dequantised(data[checkpoints.expert_name(1, expert, p)]))
    print(f"RAWINT4 {backend}: relative error against the dequantised experts: {error:.4f}")
    assert error < bound
