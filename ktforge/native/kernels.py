"""The C kernels on numpy arrays.

Every function checks dtypes, shapes and contiguity before it hands out a pointer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ktforge._native import ffi, lib
from ktforge.contract.tensors import BF16, F8_E4M3, Part
from ktforge.native.arrays import is_array, pointer, require, row_stride


class NotFinite(ValueError):
    """A weight is NaN or infinite; ``row`` and ``col`` say where."""

    def __init__(self, row: int, col: int) -> None:
        super().__init__(f"row {row}, column {col}")
        self.row, self.col = row, col


@dataclass(frozen=True)
class Fp8Blocks:
    """A bf16 matrix that is not made yet (see contract/pending.py): :func:`fp8_to_bf16` of these arrays.

    ``codes``: float8_e4m3fn [n, k]; ``scale``: float32, one for each ``block`` (rows, columns). Raises ValueError.
    """

    codes: np.ndarray
    scale: np.ndarray
    block: tuple[int, int]

    def __post_init__(self) -> None:
        codes, (rows, cols) = self.codes, self.block
        require(
            codes.ndim == 2 and is_array(codes, F8_E4M3, codes.shape), "weight must be contiguous float8_e4m3fn [n, k]"
        )
        require(rows > 0 and cols > 0, "blocks must not be empty")
        shape = (-(-codes.shape[0] // rows), -(-codes.shape[1] // cols))
        require(is_array(self.scale, np.float32, shape), f"scale must be contiguous float32 {list(shape)}")

    @property
    def dtype(self) -> np.dtype:
        return BF16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def make(self) -> np.ndarray:
        (n, k), (rows, cols) = self.codes.shape, self.block
        out = np.empty((n, k), BF16)
        status = lib.ktq_fp8_to_bf16(
            pointer(self.codes, "uint8_t *"), n, k, pointer(self.scale, "float *"), self.scale.shape[1], rows, cols,
            pointer(out, "uint16_t *"),
        )  # fmt: skip
        require(status == lib.KTQ_OK, "blocks must not be empty")
        return out


def absmax(weight: np.ndarray, bits: int, codes: np.ndarray, scales: np.ndarray) -> None:
    """Quantises bf16 ``weight`` [n, k] (rows may be apart) to int8 ``codes`` [n, k] and float32 ``scales`` [n].

    The rule is KTransformers' (docs/formats/kt-amx.md): value = code * scale for 8 bits, code * 16 * scale for 4.
    Raises NotFinite, ValueError for arrays that do not fit.
    """
    require(weight.ndim == 2 and weight.dtype == BF16, "weight must be bf16 [n, k]")
    n, k = weight.shape
    stride = row_stride(weight)
    require(is_array(codes, np.int8, (n, k)), "codes must be contiguous int8 [n, k]")
    require(is_array(scales, np.float32, (n,)), "scales must be contiguous float32 [n]")
    where = ffi.new("struct ktq_where *")
    status = lib.ktq_absmax(
        pointer(weight, "uint16_t *"), n, k, stride, bits, pointer(codes, "int8_t *"), pointer(scales, "float *"),
        where,
    )  # fmt: skip
    if status == lib.KTQ_NOT_FINITE:
        raise NotFinite(where.row, where.col)
    require(status == lib.KTQ_OK, f"{bits} bits cannot be quantised to")


def kt_amx_pack(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs int8 ``codes`` [n, k] into the AMX B-operand layout: int8 ``out`` [n * k * bits / 8].

    Raises ValueError if n is not a multiple of 32, or k of 64 (8 bits) or 128 (4 bits).
    """
    require(codes.ndim == 2 and is_array(codes, np.int8, codes.shape), "codes must be contiguous int8 [n, k]")
    n, k = codes.shape
    require(bits in (4, 8) and is_array(out, np.int8, (n * k * bits // 8,)), "out must be int8 [n * k * bits / 8]")
    status = lib.ktq_kt_amx_pack(pointer(codes, "int8_t *"), n, k, bits, pointer(out, "int8_t *"))
    require(status == lib.KTQ_OK, f"[{n}, {k}] does not divide into tiles of {bits} bits")


def kt_amx_unpack(packed: np.ndarray, shape: tuple[int, int], bits: int) -> np.ndarray:
    """The inverse of :func:`kt_amx_pack`: int8 codes [n, k] from int8 ``packed`` [n * k * bits / 8]."""
    n, k = shape
    require(
        bits in (4, 8) and is_array(packed, np.int8, (n * k * bits // 8,)), "packed must be int8 [n * k * bits / 8]"
    )
    codes = np.empty(shape, np.int8)
    status = lib.ktq_kt_amx_unpack(pointer(packed, "int8_t *"), n, k, bits, pointer(codes, "int8_t *"))
    require(status == lib.KTQ_OK, f"[{n}, {k}] does not divide into tiles of {bits} bits")
    return codes


def group(
    weight: np.ndarray, bits: int, group_size: int, bf16_scales: bool, codes: np.ndarray, scales: np.ndarray,
    zeros: np.ndarray | None = None, *, narrow: bool = False,
) -> None:  # fmt: skip
    """Quantises bf16 ``weight`` [n, k] in groups of ``group_size`` columns to int8 ``codes`` [n, k].

    ``scales`` is float32 [n, ceil(k / group_size)], its values rounded to bf16 if ``bf16_scales``; ``zeros`` int8 of
    the same shape for asymmetric codes, None for symmetric ones, of which ``narrow`` leaves out the lowest.
    value = (code - zero) * scale.
    Raises NotFinite, ValueError for arrays that do not fit.
    """
    require(weight.ndim == 2 and weight.dtype == BF16, "weight must be bf16 [n, k]")
    require(bits in (4, 8) and group_size > 0, "bits must be 4 or 8, and a group must have columns")
    require(not narrow or zeros is None, "narrow codes have no zero points")
    n, k = weight.shape
    stride = row_stride(weight)
    groups = (n, -(-k // group_size))
    require(is_array(codes, np.int8, (n, k)), "codes must be contiguous int8 [n, k]")
    require(is_array(scales, np.float32, groups), f"scales must be contiguous float32 {list(groups)}")
    require(zeros is None or is_array(zeros, np.int8, groups), f"zeros must be contiguous int8 {list(groups)}")
    where = ffi.new("struct ktq_where *")
    status = lib.ktq_group(
        pointer(weight, "uint16_t *"), n, k, stride, bits, group_size, narrow, bf16_scales, pointer(codes, "int8_t *"),
        pointer(scales, "float *"), ffi.NULL if zeros is None else pointer(zeros, "int8_t *"), where,
    )  # fmt: skip
    if status == lib.KTQ_NOT_FINITE:
        raise NotFinite(where.row, where.col)
    require(status == lib.KTQ_OK, "weight cannot be quantised so")


def search(
    weight: np.ndarray, bits: int, group_size: int, factors: np.ndarray, weights: np.ndarray | None, codes: np.ndarray,
    scales: np.ndarray, *, step: int = 1, bf16_scales: bool = False,
) -> None:  # fmt: skip
    """Quantises bf16 ``weight`` [n, k] in groups of ``group_size`` columns by scales that are searched.

    The candidates are ``factors`` (float32, ascending) of the scale at which the largest weight is the highest code,
    2^(bits - 1) - 1. What decides is the squared error, weighted with ``weights`` (float32 [k], from 0 to 1) or, where
    that is None, with each weight's own magnitude; the scale is then fitted to its codes (native/src/search.c).
    ``codes``: int8 [n, k], never the lowest; ``scales``: float32 [n, ceil(k / group_size)], rounded to bf16 if
    ``bf16_scales``. value = code * step * scale. Raises NotFinite, ValueError for arrays that do not fit.
    """
    require(weight.ndim == 2 and weight.dtype == BF16, "weight must be bf16 [n, k]")
    require(bits in (4, 8) and group_size > 0, "bits must be 4 or 8, and a group must have columns")
    n, k = weight.shape
    stride = row_stride(weight)
    groups = (n, -(-k // group_size))
    require(
        factors.ndim == 1 and factors.size > 0 and is_array(factors, np.float32, factors.shape),
        "factors must be float32",
    )
    require(weights is None or is_array(weights, np.float32, (k,)), "weights must be contiguous float32 [k]")
    require(is_array(codes, np.int8, (n, k)), "codes must be contiguous int8 [n, k]")
    require(is_array(scales, np.float32, groups), f"scales must be contiguous float32 {list(groups)}")
    room, where = np.empty(2 * min(k, group_size) + 16, np.float32), ffi.new("struct ktq_where *")
    status = lib.ktq_search(
        pointer(weight, "uint16_t *"), n, k, stride, bits, group_size,
        ffi.NULL if weights is None else pointer(weights, "float *"), pointer(factors, "float *"), factors.size, step,
        bf16_scales, pointer(room, "float *"), pointer(codes, "int8_t *"), pointer(scales, "float *"), where,
    )  # fmt: skip
    if status == lib.KTQ_NOT_FINITE:
        raise NotFinite(where.row, where.col)
    require(status == lib.KTQ_OK, "weight cannot be quantised so")


def nibbles_pack(codes: np.ndarray, out: np.ndarray) -> None:
    """int8 ``codes`` of 4 bits, an even number of them, two a byte into ``out``: low nibble first, each as code + 8."""
    require(
        codes.size % 2 == 0 and is_array(codes, np.int8, codes.shape), "codes must be contiguous int8, even in number"
    )
    require(out.nbytes * 2 == codes.size and out.flags.c_contiguous, "out must have one byte for two codes")
    lib.ktq_nibbles_pack(pointer(codes, "int8_t *"), codes.size, pointer(out, "uint8_t *"))


def nibbles_unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of :func:`nibbles_pack`: int8 codes of ``shape``."""
    codes = np.empty(shape, np.int8)
    require(packed.nbytes * 2 == codes.size and packed.flags.c_contiguous, "packed must have one byte for two codes")
    lib.ktq_nibbles_unpack(pointer(packed, "uint8_t *"), codes.size, pointer(codes, "int8_t *"))
    return codes


def absmax_kt_amx(weight: np.ndarray | Fp8Blocks, part: Part, bits: int, out: np.ndarray, scales: np.ndarray) -> None:
    """:func:`absmax` and :func:`kt_amx_pack` of a part of bf16 ``weight`` in one pass, without an array of codes; of an
    :class:`Fp8Blocks` also without one of bf16.

    ``out``: int8 [n * k * bits / 8], ``scales``: float32 [n] for a part of [n, k]. Raises NotFinite with the place in
    the part, ValueError.
    """
    require(weight.dtype == BF16 and len(weight.shape) == 2, "weight must be bf16 [n, k]")
    source = part.of(weight.codes if isinstance(weight, Fp8Blocks) else weight)
    n, k = source.shape
    require((n, k) == part.shape, "the part must lie within the weight")
    stride = row_stride(source)
    require(bits in (4, 8) and is_array(out, np.int8, (n * k * bits // 8,)), "out must be int8 [n * k * bits / 8]")
    require(is_array(scales, np.float32, (n,)), "scales must be contiguous float32 [n]")
    where = ffi.new("struct ktq_where *")
    to = bits, pointer(out, "int8_t *"), pointer(scales, "float *"), where
    if isinstance(weight, Fp8Blocks):
        blocks = ffi.new("struct ktq_blocks *", {
            "scale": pointer(weight.scale, "float *"), "stride": weight.scale.shape[1],
            "rows": weight.block[0], "cols": weight.block[1], "row0": part.rows[0], "col0": part.cols[0],
        })  # fmt: skip
        status = lib.ktq_kt_amx_from_fp8(pointer(source, "uint8_t *"), n, k, stride, blocks, *to)
    else:
        status = lib.ktq_kt_amx_from_bf16(pointer(source, "uint16_t *"), n, k, stride, *to)
    if status == lib.KTQ_NOT_FINITE:
        raise NotFinite(where.row, where.col)
    require(status == lib.KTQ_OK, f"[{n}, {k}] does not divide into tiles of {bits} bits")


def fp8_to_bf16(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """float8_e4m3fn ``weight`` [n, k] times float32 ``scale`` [ceil(n / block[0]), ceil(k / block[1])], as bf16."""
    return Fp8Blocks(weight, scale, block).make()


def nibbles_to_bf16(codes: np.ndarray, values: np.ndarray, scale: np.ndarray, columns: int) -> np.ndarray:
    """uint8 ``codes`` [n, k / 2], two codes of 4 bits a byte, the lower half first, as bf16 [n, k].

    ``values``: float32 [16], what each code stands for; ``scale``: float32 [n, ceil(k / columns)], for so many
    ``columns`` each. Raises ValueError for arrays that do not fit.
    """
    require(codes.ndim == 2 and is_array(codes, np.uint8, codes.shape), "codes must be contiguous uint8 [n, k / 2]")
    n, k = codes.shape[0], 2 * codes.shape[1]
    require(columns > 0 and columns % 2 == 0, "a scale must be for an even number of columns")
    require(is_array(values, np.float32, (16,)), "values must be contiguous float32 [16]")
    groups = -(-k // columns)
    require(is_array(scale, np.float32, (n, groups)), f"scale must be contiguous float32 {[n, groups]}")
    out = np.empty((n, k), BF16)
    status = lib.ktq_nibbles_to_bf16(
        pointer(codes, "uint8_t *"), n, k, pointer(values, "float *"), pointer(scale, "float *"), groups, columns,
        pointer(out, "uint16_t *"),
    )  # fmt: skip
    require(status == lib.KTQ_OK, "codes and scales do not fit")
    return out


def to_bf16(array: np.ndarray) -> np.ndarray:
    """float16 or float32 of any shape as bf16, rounded to nearest, ties to even."""
    require(array.dtype in (np.float16, np.float32), f"{array.dtype} is neither float16 nor float32")
    array = np.ascontiguousarray(array)
    out = np.empty(array.shape, BF16)
    if array.dtype == np.float16:
        lib.ktq_f16_to_bf16(pointer(array, "uint16_t *"), array.size, pointer(out, "uint16_t *"))
    else:
        lib.ktq_f32_to_bf16(pointer(array, "float *"), array.size, pointer(out, "uint16_t *"))
    return out


@dataclass(frozen=True)
class Difference:
    """How far bf16 weights are apart from others, in sums over all: their squares (``first``, ``second``), their
    ``product``, the ``square`` of their difference, and its ``largest`` magnitude. A NaN or an infinity among them
    leaves no sum finite that it is part of."""

    first: float
    second: float
    product: float
    square: float
    largest: float


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Of two contiguous bf16 arrays of one shape. Raises ValueError for others."""
    require(is_array(first, BF16, first.shape), "first must be contiguous bf16")
    require(is_array(second, BF16, first.shape), "second must be contiguous bf16 of first's shape")
    total = ffi.new("struct ktq_difference *")
    lib.ktq_difference(pointer(first, "uint16_t *"), pointer(second, "uint16_t *"), first.size, total)
    return Difference(total.first, total.second, total.product, total.square, total.largest)
