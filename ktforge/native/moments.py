"""The C kernels of error feedback on numpy arrays: products of one order, second moments, codes."""

from __future__ import annotations

import numpy as np

from ktforge._native import ffi, lib
from ktforge.contract.tensors import BF16
from ktforge.native.arrays import is_array, pointer, require, row_stride
from ktforge.native.kernels import NotFinite

#: Columns of a block and rows that are worked on together, as native/src/feedback.h has them.
BLOCK, ROWS = 64, 32


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 ``a`` [m, k] times ``b`` [k, n], each number summed over k in order: the same bits on every CPU, by any
    number of threads. ``a`` may be a transposed view. Raises ValueError for arrays that do not fit."""
    require(a.ndim == 2 and a.dtype == np.float32, "a must be float32 [m, k]")
    (m, k), n = a.shape, b.shape[-1]
    require(is_array(b, np.float32, (k, n)), "b must be contiguous float32 [k, n]")
    require(
        all(s > 0 and s % 4 == 0 for s in a.strides) and a.flags.aligned, "the numbers of a must follow one another"
    )
    out = np.zeros((m, n), np.float32)
    _add_product(a, b, out, n)
    return out


def second_moments(x: np.ndarray) -> np.ndarray:
    """float32 [k, k]: the mean over n of the products of inputs ``x`` [n, k], contiguous float32."""
    require(x.ndim == 2 and len(x) > 0 and is_array(x, np.float32, x.shape), "x must be contiguous float32 [n, k]")
    k = x.shape[1]
    out = np.zeros((k, k), np.float32)
    for start in range(0, k, 4 * BLOCK):  # what lies above the diagonal; the rest is its mirror image
        stop = min(k, start + 4 * BLOCK)
        _add_product(x[:, start:stop].T, x[:, start:], out[start:stop, start:], k - start)
        out[start:, start:stop] = out[start:stop, start:].T
    out /= np.float32(len(x))
    return out


def _add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, n: int) -> None:
    """``b`` and ``out`` may be columns of larger arrays."""
    status = lib.ktq_product(
        pointer(a, "float *"), a.strides[0] // 4, a.strides[1] // 4, pointer(b, "float *"), b.strides[0] // 4,
        pointer(out, "float *"), out.strides[0] // 4, *a.shape, n,
    )  # fmt: skip
    require(status == lib.KTQ_OK, "the matrices do not fit")


def silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up of contiguous float32 arrays of one shape, the same bits on every CPU."""
    require(is_array(gate, np.float32, gate.shape), "gate must be contiguous float32")
    require(is_array(up, np.float32, gate.shape), "up must be contiguous float32 of gate's shape")
    out = np.empty_like(gate)
    lib.ktq_silu(pointer(gate, "float *"), pointer(up, "float *"), gate.size, pointer(out, "float *"))
    return out


def factor_bytes(k: int) -> int:
    """What :func:`factor` of [k, k] needs for a moment."""
    return 8 * k * (k + 2 * BLOCK)


def factor(moments: np.ndarray, damping: float) -> np.ndarray:
    """The upper Cholesky factor [k, k] of the inverse of second ``moments`` [k, k], float32 and symmetric, to whose
    diagonal ``damping`` times its mean is added. Raises ValueError for what are no second moments."""
    require(moments.ndim == 2 and moments.size > 0, "moments must be float32 [k, k]")
    k = len(moments)
    require(is_array(moments, np.float32, (k, k)), "moments must be contiguous float32 [k, k]")
    out, room = moments.copy(), np.empty(factor_bytes(k) // 8, np.float64)
    status = lib.ktq_factor(pointer(out, "float *"), k, damping, pointer(room, "double *"))
    require(status == lib.KTQ_OK, "these are no second moments: they have no Cholesky factor")
    return out


def feedback(
    weight: np.ndarray, bits: int, group_size: int, order: np.ndarray, factor: np.ndarray, scales: np.ndarray,
    codes: np.ndarray, *, step: int = 1,
) -> None:  # fmt: skip
    """Fills int8 ``codes`` [n, k] of bf16 ``weight`` [n, k] for given ``scales``, float32 [n, ceil(k / group_size)].

    Column by column in ``order`` (uint32 [k]), each error spread over the columns behind it by ``factor``, float32
    [k, k], that of the inputs' second moments in this order (GPTQ, https://arxiv.org/abs/2210.17323).
    value = code * step * scale. Raises NotFinite, ValueError for arrays that do not fit.
    """
    require(weight.ndim == 2 and weight.dtype == BF16, "weight must be bf16 [n, k]")
    require(bits in (4, 8) and group_size > 0, "bits must be 4 or 8, and a group must have columns")
    n, k = weight.shape
    stride = row_stride(weight)
    groups = (n, -(-k // group_size))
    require(is_array(order, np.uint32, (k,)), "order must be contiguous uint32 [k]")
    require(np.array_equal(np.sort(order), np.arange(k)), "order must name each column once")
    require(is_array(factor, np.float32, (k, k)), "factor must be contiguous float32 [k, k]")
    require(is_array(scales, np.float32, groups), f"scales must be contiguous float32 {list(groups)}")
    require(is_array(codes, np.int8, (n, k)), "codes must be contiguous int8 [n, k]")
    room, where = np.empty(ROWS * (k + BLOCK), np.float32), ffi.new("struct ktq_where *")
    status = lib.ktq_feedback(
        pointer(weight, "uint16_t *"), n, k, stride, bits, group_size, pointer(order, "uint32_t *"),
        pointer(factor, "float *"), pointer(scales, "float *"), step, pointer(room, "float *"),
        pointer(codes, "int8_t *"), where,
    )  # fmt: skip
    if status == lib.KTQ_NOT_FINITE:
        raise NotFinite(where.row, where.col)
    require(status == lib.KTQ_OK, "weight cannot be quantised so")
