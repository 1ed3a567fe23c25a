"""Packed integer codes and what they stand for. Not a plugin itself."""

from __future__ import annotations

import numpy as np

from ktforge import native
from ktforge.tensors import BF16
from ktforge_plugins.preprocess.scales import BAND

#: What codes of 4 bits stand for that are stored with 8 added.
INT4 = np.arange(-8, 8, dtype=np.float32)


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
    """BF16 [n, columns] of codes that mean code - 2^(bits - 1), times float32 ``scale`` [n, columns / group]."""
    if bits == 4 and group % 2 == 0 and columns == 2 * words.view(np.uint8).shape[1]:
        return native.nibbles_to_bf16(np.ascontiguousarray(words).view(np.uint8), INT4, scale, group)
    return affine(unpacked(words, bits)[:, :columns].astype(np.int16) - (1 << (bits - 1)), None, scale)


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
