"""The generated inputs of golden/amx_large.json: sums of four uniform 16-bit fields from a splitmix64 stream."""

import ml_dtypes
import numpy as np


def golden_input(seed: int, n: int, k: int) -> np.ndarray:
    """bf16 [n, k]."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, n * k + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    total = sum((z >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
    value = (total.astype(np.int64) - 131070).astype(np.float32) * np.float32(2.0**-21)
    return (value.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(n, k)
