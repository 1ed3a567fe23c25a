"""GPTQ and AWQ as AutoRound writes and reads them: the packing of both zero-point versions and the order of AWQ."""

import numpy as np
import pytest
import torch
from checkpoints import BF16
from ktforge_plugins import Awq, Gptq, MoeToBf16
from preprocess.units import weight

pytestmark = pytest.mark.runtime
ROWS, COLUMNS, GROUP = 64, 256, 32


def quantised(bits, symmetric, seed):
    """A linear layer whose weights lie on the grid of random scales [rows, groups], and its zero points."""
    random = np.random.default_rng(seed)
    shape = (ROWS, COLUMNS // GROUP)
    scales = torch.from_numpy((random.random(shape) * 0.02 + 1e-3).astype(np.float16))
    # The first version stores zero - 1 and clamps it to 0, so that no zero point of 0 survives.
    zeros = torch.from_numpy(random.integers(1, 1 << bits, shape).astype(np.float32))
    if symmetric:
        zeros = torch.full(shape, float(1 << (bits - 1)))
    codes = torch.from_numpy(random.integers(0, 1 << bits, (ROWS, COLUMNS)).astype(np.float32))
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    spread = (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
    linear.weight.data = spread
    return linear, scales, zeros


def numpy_of(tensor):
    return tensor.contiguous().numpy()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("version", "quantization"),
    [
        ("gptq", {"quant_method": "gptq"}),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
        ("gptq_v2", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
        ("gptq_v2", {"quant_method": "auto-round", "packing_format": "auto_round"}),
    ],
)
def test_gptq(bits, symmetric, ordered, version, quantization):
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    module = qlinear_torch_zp if version == "gptq" else qlinear_torch
    linear, scales, zeros = quantised(bits, symmetric, seed=bits)
    packed = module.QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False, g_idx=ordered)
    packed.device = "cpu"  # pack of the second version asks for it, and nothing sets it
    packed.pack(linear, scales, zeros, device="cpu")
    arrays = {n: numpy_of(getattr(packed, n)) for n in ("qweight", "qzeros", "scales")}
    if ordered:
        packed.g_idx = packed.g_idx[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
        arrays["g_idx"] = numpy_of(packed.g_idx)
    # In float32: with scales of 16 bits, its product is rounded to those first.
    packed.scales = packed.scales.float()
    want = packed(torch.eye(COLUMNS)).T.bfloat16()
    config = {"quantization_config": {"bits": bits, "group_size": GROUP, **quantization}}
    got = weight(Gptq(), arrays, config)
    assert got.tobytes() == want.contiguous().view(torch.int16).numpy().tobytes()
    if not ordered:
        assert torch.equal(want, linear.weight.bfloat16())
    assert weight(MoeToBf16(), arrays, config).tobytes() == got.tobytes()


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric):
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

    linear, scales, zeros = quantised(4, symmetric, seed=9)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T, device="cpu")
    arrays = {n: numpy_of(getattr(packed, n)) for n in ("qweight", "qzeros", "scales")}
    want = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP).T.bfloat16()
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}}
    got = weight(Awq(), arrays, config)
    assert got.dtype == BF16 and got.tobytes() == want.contiguous().view(torch.int16).numpy().tobytes()
    assert torch.equal(want, linear.weight.bfloat16())
