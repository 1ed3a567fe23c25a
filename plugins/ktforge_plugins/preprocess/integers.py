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


def unpacked_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes (uint8) packed along the first axis of int32 ``words`` [rows, columns]."""
    mask, per_word = (1 << bits) - 1, 32 // bits
    parts = np.stack([words >> (bits * i) & mask for i in range(per_word)], axis=1)
    return parts.astype(np.uint8).reshape(-1, words.shape[1])


def symmetric(words: np.ndarray, bits: int, columns: int, scale: np.ndarray, group: int) -> np.ndarray:
    """BF16 [n, columns] of codes that mean code - 2^(bits - 1), times float32 ``scale`` [n, groups].

    Up to 4 bits, a table turns each byte into e4m3 numbers, which hold these integers exactly, and the FP8 kernel does
    the rest: 3 times as fast as arithmetic on arrays.
    """
    if bits > 4:
        return affine(unpacked(words, bits)[:, :columns].astype(np.int16) - (1 << (bits - 1)), None, scale)
    values = _e4m3_table(bits)[np.ascontiguousarray(words).view(np.uint8)].view(F8_E4M3)
    return native.fp8_to_bf16(np.ascontiguousarray(values[:, :columns]), scale, (1, group))


def affine(codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray) -> np.ndarray:
    """BF16 [n, k]: (codes - zeros) * scale as float32, rounded once.

    ``codes``: integers [n, k]; ``zeros``: integers [n, groups]; ``scale``: float32 [n, groups]; groups of equal size.
    The difference of codes of up to 8 bits is exact, and so is its product with a 16-bit scale.
    """
    n, groups = scale.shape
    out = np.empty(codes.shape, BF16)
    for start in range(0, n, BAND):
        rows = slice(start, min(n, start + BAND))
        values = codes[rows].astype(np.float32).reshape(rows.stop - start, groups, -1)
        if zeros is not None:
            values -= zeros[rows, :, None]
        values *= scale[rows, :, None]
        out[rows] = native.to_bf16(values.reshape(rows.stop - start, -1))
    return out


def affine_by_input(codes: np.ndarray, zeros: np.ndarray | None, scale: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """BF16 [out, in] as :func:`affine`, of ``codes`` [in, out] with ``zeros`` and ``scale`` [groups, out].

    ``group_of`` [in] is the group of each input.
    """
    k, n = codes.shape
    out = np.empty((n, k), BF16)
    zeros = None if zeros is None else zeros.astype(np.float32)
    for start in range(0, k, BAND):
        rows = slice(start, start + BAND)
        values = codes[rows].astype(np.float32)
        if zeros is not None:
            values -= zeros[group_of[rows]]
        values *= scale[group_of[rows]]
        out[:, rows] = native.to_bf16(values).T
    return out


@cache
def _e4m3_table(bits: int) -> np.ndarray:
    """Byte → the e4m3 numbers, side by side, that its codes stand for."""
    codes = unpacked(np.arange(256, dtype=np.uint8)[:, None], bits).astype(np.float32) - (1 << (bits - 1))
    return codes.astype(F8_E4M3).view(np.dtype(f"u{8 // bits}")).reshape(256)
