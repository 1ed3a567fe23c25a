"""Packed integer codes and what they stand for. Not a plugin itself."""

from __future__ import annotations

from functools import cache

import numpy as np

from ktforge import native
from ktforge.tensors import BF16, F8_E4M3
from ktforge_plugins.preprocess.scales import BAND


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes (uint8) packed along the last axis of ``words``, lowest bits first; ``bits`` divides 8."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    mask, per_byte = (1 << bits) - 1, 8 // bits
    parts = np.stack([codes >> (bits * i) & mask for i in range(per_byte)], axis=-1)
    return parts.reshape(*codes.shape[:-1], codes.shape[-1] * per_byte)


def symmetric(words: np.ndarray, bits: int, columns: int, scale: np.ndarray, group: int) -> np.ndarray:
    """BF16 [n, columns] of codes that mean code - 2^(bits - 1), times float32 ``scale`` [n, groups].

    Up to 4 bits, a table turns each byte into e4m3 numbers, which hold these integers exactly, and the FP8 kernel does
    the rest: 6 times as fast as arithmetic on arrays.
    """
    if bits > 4:
        codes = unpacked(words, bits)[:, :columns].astype(np.int16) - (1 << (bits - 1))
        return affine(codes, None, scale, np.arange(columns) // group)
    table = _e4m3_table(bits)
    values = table[np.ascontiguousarray(words).view(np.uint8)].view(F8_E4M3)
    return native.fp8_to_bf16(np.ascontiguousarray(values[:, :columns]), scale, (1, group))


def affine(codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """BF16 [n, k]: (codes - zeros) * scale as float32, rounded once.

    ``codes``: integers [n, k]; ``zeros``: integers [n, groups]; ``scale``: float32 [n, groups]; ``group_of``: the group
    of each of the k columns. The difference and the product of a code of up to 8 bits and a 16-bit scale are exact.
    """
    out = np.empty(codes.shape, BF16)
    for start in range(0, len(codes), BAND):
        rows = slice(start, start + BAND)
        values = codes[rows].astype(np.float32)
        if zeros is not None:
            values -= zeros[rows].astype(np.float32)[:, group_of]
        out[rows] = native.to_bf16(values * scale[rows][:, group_of])
    return out


@cache
def _e4m3_table(bits: int) -> np.ndarray:
    """Byte → the e4m3 numbers, side by side, that its codes stand for."""
    codes = unpacked(np.arange(256, dtype=np.uint8)[:, None], bits).astype(np.float32) - (1 << (bits - 1))
    return codes.astype(F8_E4M3).view(np.dtype(f"u{8 // bits}")).reshape(256)
