"""kt-kernel's own wrapper of a layer of experts, on a machine without a GPU."""

from pathlib import Path

import checkpoints
import pytest
import torch
from runtime.layers import TOP


def _unpinned(make):
    return lambda *args, pin_memory=False, **options: make(*args, **options)


@pytest.fixture
def wrapper(monkeypatch):
    """A function of a method and a folder that gives kt-kernel's wrapper of layer 1, all experts on the CPU."""
    from kt_kernel import KTMoEWrapper
    from kt_kernel.utils.amx import AMXMoEWrapper, NativeMoEWrapper
    from kt_kernel.utils.loader import CompressedSafeTensorLoader

    # Pinned memory is for a GPU, and needs one.
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, _unpinned(getattr(torch, name)))
    # RAWINT4 with AVX2 computes with the tensors that were loaded, which the wrapper of 0.7.2 then lets go.
    kept, load_experts = [], CompressedSafeTensorLoader.load_experts

    def load_and_keep(*args, **options):
        kept.append(load_experts(*args, **options))
        return kept[-1]

    monkeypatch.setattr(CompressedSafeTensorLoader, "load_experts", load_and_keep)

    def make(method: str, folder: Path):
        # Both keep the loader of the first folder for ever.
        monkeypatch.setattr(AMXMoEWrapper, "_safetensor_loader_instance", None)
        monkeypatch.setattr(NativeMoEWrapper, "_native_loader_instance", None)
        return KTMoEWrapper(
            layer_idx=1, num_experts=checkpoints.EXPERTS, num_experts_per_tok=TOP, hidden_size=checkpoints.HIDDEN,
            moe_intermediate_size=checkpoints.SIZE, gpu_experts_mask=None, cpuinfer_threads=1, threadpool_count=1,
            weight_path=str(folder), chunked_prefill_size=128, method=method, numa_nodes=[0],
        )  # fmt: skip

    yield make
    kept.clear()
