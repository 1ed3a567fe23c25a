"""Every public function of the C library that computes, called with numbers at all the ends of their formats."""

from collections.abc import Callable, Iterator
from functools import cache

import ml_dtypes
import numpy as np
from ktforge._native import lib

from ktforge import native
from ktforge.contract.tensors import BF16, Part

F8 = np.dtype(ml_dtypes.float8_e4m3fn)

#: bf16: zeros of both signs, subnormals, the smallest and the largest normal numbers, halves of codes.
BF16_EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80, 0x3F00]
#: float16: the same, and the smallest that no bf16 rounds to.
F16_EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x3C01]
#: float32: the same, and halves between two bf16, subnormal ones among them.
F32_EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F800000, 0xFF800000, 0x00008000, 0x80018000, 0x3F808000, 0x3F818000,
]  # fmt: skip
#: Scales of every reach: products are subnormal, normal, or at the end.
SCALES = np.array(
    [0x00000001, 0x80000007, 0x00400000, 0x00800000, 0x0C800000, 0x3F800001, 0xBF99999A, 0x72000000], np.uint32
).view(np.float32)


def rows_of_edges(shape: tuple[int, int]) -> np.ndarray:
    """bf16 [n, k]: each row of numbers up to one of the ends, rows of zeros of each sign and of both among them."""
    random = np.random.default_rng(shape[1])
    edges = np.array(BF16_EDGES, np.uint16)
    rows = np.empty(shape, np.uint16)
    for i, row in enumerate(rows):
        # An even row has numbers of one magnitude and zeros, so that it is not always the largest that rules.
        known = edges if i % 2 else edges[[0, 1, (i // 2) % len(edges), (i // 2 + 3) % len(edges)]]
        row[:] = random.choice(known, shape[1])
    rows[0], rows[2 % shape[0]], rows[4 % shape[0]] = 0x8000, 0x0000, 0x8000
    rows[4 % shape[0], 0::7] = 0x0000  # the first of a run is +0, most are -0
    rows[6 % shape[0]], rows[6 % shape[0], 3::7] = 0x0000, 0x8000
    return rows.view(BF16)


def _quantised(weight: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    codes, scales = np.empty(weight.shape, np.int8), np.empty(weight.shape[0], np.float32)
    native.absmax(weight, bits, codes, scales)
    yield from (codes, scales)


def _in_groups(weight: np.ndarray, bits: int, size: int, kind: str, bf16: bool) -> Iterator[np.ndarray]:
    shape = weight.shape[0], -(-weight.shape[1] // size)
    codes, scales, zeros = np.empty(weight.shape, np.int8), np.empty(shape, np.float32), np.zeros(shape, np.int8)
    native.group(
        weight, bits, size, bf16, codes, scales, zeros if kind == "asymmetric" else None, narrow=kind == "narrow"
    )
    yield from (codes, scales, zeros)


def _fused(weight: np.ndarray | native.Fp8Blocks, bits: int) -> Iterator[np.ndarray]:
    n, k = weight.shape
    out, scales = np.empty(n * k * bits // 8, np.int8), np.empty(n, np.float32)
    native.absmax_kt_amx(weight, Part("up", 0, (0, n), (0, k)), bits, out, scales)
    yield from (out, scales)


def _absmax() -> Iterator[np.ndarray]:
    for k in (1, 7, 16, 31, 32, 33, 64, 95):
        for bits in (4, 8):
            yield from _quantised(rows_of_edges((64, k)), bits)


def _group() -> Iterator[np.ndarray]:
    weight = rows_of_edges((64, 96))
    for size in (1, 8, 16, 31, 32, 33, 48, 96):
        for bits in (4, 8):
            for kind in ("symmetric", "narrow", "asymmetric"):
                for bf16 in (True, False):
                    yield from _in_groups(weight, bits, size, kind, bf16)


def _search() -> Iterator[np.ndarray]:
    weight, factors = rows_of_edges((64, 96)), np.linspace(0.3, 1, 7, dtype=np.float32)
    weights = np.resize(np.array([0, 1, 1e-30, 0.5, 1e-7], np.float32), 96)
    for size in (1, 7, 8, 9, 31, 32, 33, 96):
        for bits, given, bf16 in ((4, None, True), (4, weights, False), (8, weights, True), (8, None, False)):
            shape = 64, -(-96 // size)
            codes, scales = np.empty(weight.shape, np.int8), np.empty(shape, np.float32)
            native.search(weight, bits, size, factors, given, codes, scales, step=16, bf16_scales=bf16)
            yield from (codes, scales)


@cache
def _inputs(n: int, k: int) -> np.ndarray:
    """float32 [n, k] of every reach, correlated. Made once, as a test may have another floating-point environment."""
    random = np.random.default_rng(k)
    x = random.standard_normal((n, k), np.float32) * np.logspace(-3, 3, k, dtype=np.float32)
    x[:, 1::2] += x[:, 0 : k - k % 2 : 2] / 2
    return x


@cache
def _moments(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Second moments of such inputs, and the order of their columns."""
    moments = native.second_moments(_inputs(2 * k, k))
    order = np.argsort(-np.diag(moments), kind="stable").astype(np.uint32)
    return np.ascontiguousarray(moments[order][:, order]), order


@cache
def _scales(shape: tuple[int, int], step: int) -> np.ndarray:
    scales = (np.random.default_rng(step).random(shape, np.float32) + np.float32(0.5)) / np.float32(4 * step)
    scales[0] = 0
    return scales


def _product() -> Iterator[np.ndarray]:
    for m, k, n in ((1, 1, 1), (3, 5, 7), (4, 257, 16), (9, 513, 47), (33, 64, 100)):
        a, b = _inputs(m, k), _inputs(k, n)
        yield native.product(a, b)
        yield native.product(np.ascontiguousarray(a.T).T, b)


_GATES = np.array([0, -0.0, 1e-45, -1e-45, 1, -1, 88.7, -88.7, 1e4, -1e4, 3e38, -3e38], np.float32)


def _silu() -> Iterator[np.ndarray]:
    yield native.silu(_GATES, np.roll(_GATES, 3))
    yield native.silu(_inputs(50, 60), _inputs(50, 60)[::-1].copy())


def _factor() -> Iterator[np.ndarray]:
    for k in (1, 2, 63, 64, 65, 200):
        yield native.factor(_moments(k)[0], 0.01)


def _feedback() -> Iterator[np.ndarray]:
    for n, k, size in ((1, 1, 1), (3, 65, 13), (33, 128, 128), (40, 200, 32)):
        moments, order = _moments(k)
        factor = native.factor(moments, 0.01)
        weight = _inputs(n, k).astype(BF16)
        for bits, step in ((4, 1), (8, 16)):
            codes = np.empty((n, k), np.int8)
            scales = _scales((n, -(-k // size)), step)
            native.feedback(weight, bits, size, order, factor, scales, codes, step=step)
            yield codes


def _fp8() -> native.Fp8Blocks:
    """Every byte but NaN, a row of scales for every two rows."""
    codes = np.random.default_rng(0).integers(0, 256, (32, 128), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    codes[3], codes[5], codes[7] = 0x80, 0x00, 0x07  # zeros of each sign, and a row of subnormals alone
    scale = np.resize(SCALES, (16, 4))[:, ::-1].copy()
    return native.Fp8Blocks(codes.view(F8), scale, (2, 32))


def _codes(bits: int) -> np.ndarray:
    top = 1 << (bits - 1)
    return np.random.default_rng(bits).integers(-top, top, (64, 256), np.int8)


def _kt_amx_pack() -> Iterator[np.ndarray]:
    for bits in (4, 8):
        out = np.empty(64 * 256 * bits // 8, np.int8)
        native.kt_amx_pack(_codes(bits), bits, out)
        yield out


def _kt_amx_unpack() -> Iterator[np.ndarray]:
    for bits in (4, 8):
        yield native.kt_amx_unpack(_codes(8).ravel()[: 64 * 256 * bits // 8], (64, 256), bits)


def _nibbles_pack() -> Iterator[np.ndarray]:
    for count in (0, 2, 62, 64, 66, 200):
        out = np.empty(count // 2, np.uint8)
        native.nibbles_pack(_codes(4).ravel()[:count], out)
        yield out


def _nibbles_unpack() -> Iterator[np.ndarray]:
    for count in (0, 2, 62, 64, 66, 512):
        yield native.nibbles_unpack(np.arange(256, dtype=np.uint8)[: count // 2], (count,))


def _nibbles_to_bf16() -> Iterator[np.ndarray]:
    codes = np.resize(np.arange(256, dtype=np.uint8), (len(SCALES), 80))
    for values in (np.arange(-8, 8), np.resize(np.array(F32_EDGES[:9], np.uint32).view(np.float32), 16)):
        yield native.nibbles_to_bf16(codes, values.astype(np.float32), SCALES.reshape(-1, 1), 160)


def _of_float(edges: list[int], bits: type, dtype: type) -> Iterator[np.ndarray]:
    for count in (1, 15, 16, 17, 64, 100):
        yield native.to_bf16(np.resize(np.array(edges, bits), count).view(dtype))


def _difference() -> Iterator[np.ndarray]:
    rows = rows_of_edges((8, 100))
    for count in (0, 1, 7, 8, 9, 64, 100):
        found = native.difference(rows[1, :count], rows[3, :count])
        yield np.array([found.first, found.second, found.product, found.square, found.largest])


#: Name in the C library → a call of it, which gives all that it made.
ENTRY_POINTS: dict[str, Callable[[], Iterator[np.ndarray]]] = {
    "ktq_absmax": _absmax,
    "ktq_group": _group,
    "ktq_search": _search,
    "ktq_product": _product,
    "ktq_silu": _silu,
    "ktq_factor": _factor,
    "ktq_feedback": _feedback,
    "ktq_kt_amx_pack": _kt_amx_pack,
    "ktq_kt_amx_unpack": _kt_amx_unpack,
    "ktq_kt_amx_from_bf16": lambda: (a for bits in (4, 8) for a in _fused(rows_of_edges((64, 256)), bits)),
    "ktq_kt_amx_from_fp8": lambda: (a for bits in (4, 8) for a in _fused(_fp8(), bits)),
    "ktq_fp8_to_bf16": lambda: iter([_fp8().make()]),
    "ktq_difference": _difference,
    "ktq_f16_to_bf16": lambda: _of_float(F16_EDGES, np.uint16, np.float16),
    "ktq_f32_to_bf16": lambda: _of_float(F32_EDGES, np.uint32, np.float32),
    "ktq_nibbles_pack": _nibbles_pack,
    "ktq_nibbles_unpack": _nibbles_unpack,
    "ktq_nibbles_to_bf16": _nibbles_to_bf16,
}


for _ready in (_product, _silu, _factor, _feedback):  # in the usual floating-point environment
    list(_ready())


def made_by(name: str) -> list[bytes]:
    return [array.tobytes() for array in ENTRY_POINTS[name]()]


def public_functions() -> set[str]:
    """Those of the library that compute."""
    return {name for name in dir(lib) if name.startswith("ktq_") and "isa" not in name and "pages" not in name}
