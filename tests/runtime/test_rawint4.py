"""A RAWINT4 folder in KTransformers' own loader and AVX2 kernel."""

import checkpoints
import numpy as np
import pytest
import reference
import torch
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, SafetensorsWriter

from ktforge import Pipeline

pytestmark = pytest.mark.runtime
GROUP, TOKENS = 32, 4


def dequantised(weight):
    codes, scales, _ = reference.quantise_groups(weight, 4, GROUP, True)
    return torch.from_numpy(codes.astype(np.float32) * np.repeat(scales, GROUP, axis=1))


@pytest.fixture
def packed(source, out):
    Pipeline(
        loader=AutoLoader(path=source), quantize=Int4(group_size=GROUP), layout=CompressedTensors(),
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
                data[checkpoints.expert_name(1, expert, projection)], 4, GROUP, True
            )  # fmt: skip
            nibbles = (codes.astype(np.int32) + 8).astype(np.uint8)
            want = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            assert np.array_equal(loaded[projection][expert].numpy(), want)
            got = loaded[f"{projection}_scale"][expert]
            assert got.dtype == torch.bfloat16 and np.array_equal(got.float().numpy(), scales)


def test_the_kernel_computes_what_the_dequantised_experts_do(packed):
    import kt_kernel_ext
    from kt_kernel.utils.loader import CompressedSafeTensorLoader

    experts, size, hidden, top = checkpoints.EXPERTS, checkpoints.SIZE, checkpoints.HIDDEN, 2
    loaded = CompressedSafeTensorLoader(str(packed)).load_experts("model.layers.1")
    config = kt_kernel_ext.moe.MOEConfig(experts, top, hidden, size)
    config.layer_idx, config.max_len = 0, 128
    config.quant_config.bits, config.quant_config.group_size = 4, GROUP
    config.quant_config.zero_point = False
    for projection in ("gate", "up", "down"):
        setattr(config, f"{projection}_projs", [[t.data_ptr() for t in loaded[projection]]])
        setattr(config, f"{projection}_scales", [[t.data_ptr() for t in loaded[f"{projection}_scale"]]])
    pool_config = kt_kernel_ext.WorkerPoolConfig()
    pool_config.subpool_count, pool_config.subpool_numa_map, pool_config.subpool_thread_count = 1, [0], [1]
    cpu = kt_kernel_ext.CPUInfer(pool_config)
    config.pool = cpu.backend_
    moe = kt_kernel_ext.moe.AVX2RawInt4_MOE(config)
    mapping = torch.arange(experts, dtype=torch.int64)
    cpu.submit(moe.load_weights_task(mapping.data_ptr()))
    cpu.sync()

    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, hidden, generator=random).bfloat16().contiguous()
    chosen = torch.stack([torch.randperm(experts, generator=random)[:top] for _ in range(TOKENS)]).contiguous()
    shares = torch.softmax(torch.randn(TOKENS, top, generator=random), -1).contiguous()
    output = torch.zeros(TOKENS, hidden, dtype=torch.bfloat16)
    count = torch.tensor([TOKENS], dtype=torch.int32)
    cpu.submit(
        moe.forward_task(
            count.data_ptr(), top, chosen.data_ptr(), shares.data_ptr(), tokens.data_ptr(), output.data_ptr(), False
        )
    )
    cpu.sync()

    data = checkpoints.tensors()
    want = torch.zeros(TOKENS, hidden)
    for token in range(TOKENS):
        x = tokens[token].float()
        for slot in range(top):
            weights = {
                p: dequantised(data[checkpoints.expert_name(1, int(chosen[token, slot]), p)])
                for p in ("gate", "up", "down")
            }
            inner = torch.nn.functional.silu(weights["gate"] @ x) * (weights["up"] @ x)
            want[token] += shares[token, slot] * (weights["down"] @ inner)
    error = (output.float() - want).norm() / want.norm()
    print(f"relative error against the dequantised experts: {error:.4f}")
    assert error < 0.01
