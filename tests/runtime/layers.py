"""What a layer of experts computes in kt-kernel, and what it should."""

import checkpoints
import torch

TOP, TOKENS = 2, 4


#: Every expert is in its own place. The engine keeps the address.
MAPPING = torch.arange(checkpoints.EXPERTS, dtype=torch.int64)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as kernels of int8 products see them: 127 steps to the largest of a token."""
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def error_of(loaded, dequantised, seen=lambda x: x) -> float:
    """How far the output of a loaded wrapper is from that of float32 arithmetic, relative.

    ``dequantised`` gives the float32 weight of an expert and a projection, ``seen`` what a product sees of a token.
    """
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, checkpoints.HIDDEN, generator=random).bfloat16().contiguous()
    order = [torch.randperm(checkpoints.EXPERTS, generator=random)[:TOP] for _ in range(TOKENS)]
    chosen, shares = torch.stack(order).contiguous(), torch.rand(TOKENS, TOP, generator=random)
    got = _computed(loaded, tokens, chosen, shares)
    want = torch.zeros(TOKENS, checkpoints.HIDDEN)
    for token, x in enumerate(tokens.float()):
        for slot, expert in enumerate(chosen[token].tolist()):
            gate, up, down = (dequantised(expert, p) for p in ("gate", "up", "down"))
            given = seen(x)
            middle = seen(torch.nn.functional.silu(gate @ given) * (up @ given))
            want[token] += shares[token, slot] * (down @ middle)
    return float((got - want).norm() / want.norm())


def _computed(loaded, tokens, chosen, shares) -> torch.Tensor:
    output, count = torch.zeros_like(tokens), torch.tensor([len(tokens)], dtype=torch.int32)
    pointers = (t.data_ptr() for t in (chosen, shares, tokens, output))
    loaded.cpu_infer.submit(loaded.moe.forward_task(count.data_ptr(), TOP, *pointers, False))
    loaded.cpu_infer.sync()
    return output.float()
