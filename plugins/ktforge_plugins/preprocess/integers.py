"""Packed integer codes and what they stand for. Not a plugin itself.

Rows of codes are unpacked a few at a time, so that beside the BF16 result only :func:`scratch` bytes live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ktforge import native
from ktforge.contract.tensors import BF16

#: What codes of 4 bits stand for that are stored with 8 added.
INT4 = np.arange(-8, 8, dtype=np.float32)
#: Codes that are worked on at once: 1 MB of float32, which stays in the cache. A GPTQ weight of 2048 x 7168 takes 3 MB
#: beside its result, and two thirds of the time that it took with 85 MB of whole arrays.
BAND_CODES = 1 << 18
#: Rows come in multiples of this, which is that of codes in a word of 32 bits, whatever their bits.
ROWS = 16
#: The most bytes a code takes while it is worked on: unpacked, as float32 with its zero point and scale, and rounded.
CODE_BYTES = 20

#: The codes of some rows.
Codes = Callable[[slice], np.ndarray]


def scratch(rows: int, columns: int) -> int:
    """Bytes that a function of this module needs at once for codes [rows, columns], beside result and operands."""
    return CODE_BYTES * min(rows, _band(columns)) * columns


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes (uint8) packed along the last axis of ``words``, lowest bits first; ``bits`` divides 8."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    mask, per_byte = (1 << bits) - 1, 8 // bits
    parts = np.empty((*codes.shape, per_byte), np.uint8)
    for i in range(per_byte):
        parts[..., i] = codes >> (bits * i) & mask
    return parts.reshape(*codes.shape[:-1], codes.shape[-1] * per_byte)


def unpacked_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """The unsigned codes (uint8) packed along the first axis of int32 ``words`` [rows, columns]."""
    mask, per_word = (1 << bits) - 1, 32 // bits
    parts = np.empty((words.shape[0], per_word, words.shape[1]), np.uint8)
    for i in range(per_word):
        parts[:, i] = words >> (bits * i) & mask
    return parts.reshape(-1, words.shape[1])


def symmetric(words: np.ndarray, bits: int, columns: int, scale: np.ndarray, group: int) -> np.ndarray:
    """BF16 [n, columns] of codes that mean code - 2^(bits - 1), times float32 ``scale`` [n, columns / group]."""
    if bits == 4 and group % 2 == 0 and columns == 2 * words.view(np.uint8).shape[1]:
        return native.nibbles_to_bf16(np.ascontiguousarray(words).view(np.uint8), INT4, scale, group)
    return affine(lambda rows: signed(words[rows], bits)[:, :columns], (words.shape[0], columns), None, scale)


def signed(words: np.ndarray, bits: int) -> np.ndarray:
    """int8 codes of ``words`` as :func:`unpacked`, each stored with 2^(bits - 1) added."""
    codes = unpacked(words, bits)
    return np.subtract(codes, 1 << (bits - 1), dtype=np.uint8).view(np.int8)


def affine(
    codes: Codes, shape: tuple[int, int], zeros: np.ndarray | None, scale: np.ndarray, order: np.ndarray | None = None
) -> np.ndarray:
    """BF16 ``shape`` [n, k]: (codes - zeros) * scale as float32, rounded once.

    ``zeros``: integers [n, groups]; ``scale``: float32 [n, groups]; groups of equal size, unless ``order`` [k] says
    which group a column is in. The difference of codes of up to 8 bits is exact, and so is its product with a 16-bit
    scale.
    """
    (n, k), groups = shape, scale.shape[1]
    out = np.empty(shape, BF16)
    for rows in bands(n, k):
        values = codes(rows).astype(np.float32)
        grouped = values.reshape(-1, groups, k // groups) if order is None else values
        which = np.s_[rows, :, None] if order is None else np.s_[rows, order]
        if zeros is not None:
            grouped -= zeros[which]
        grouped *= scale[which]
        out[rows] = native.to_bf16(values)
    return out


def affine_by_input(
    codes: Codes, shape: tuple[int, int], zeros: np.ndarray | None, scale: np.ndarray, group_of: np.ndarray
) -> np.ndarray:
    """BF16 [out, in] as :func:`affine`, of codes of ``shape`` [in, out] with ``zeros`` and ``scale`` [groups, out].

    ``group_of`` [in] is the group of each input.
    """
    k, n = shape
    out = np.empty((n, k), BF16)
    for rows in bands(k, n):
        values = codes(rows).astype(np.float32)
        if zeros is not None:
            values -= zeros[group_of[rows]]
        values *= scale[group_of[rows]]
        out[:, rows] = native.to_bf16(values).T
    return out


def _band(columns: int) -> int:
    """Rows of so many columns that are worked on at once."""
    return max(ROWS, BAND_CODES // max(1, columns) // ROWS * ROWS)


def bands(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a matrix, a few at a time."""
    band = _band(columns)
    return (slice(start, min(rows, start + band)) for start in range(0, rows, band))
