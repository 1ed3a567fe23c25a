"""Every entry point of the C library refuses sizes that its kernels would read or write past, and touches nothing.

Python's own checks come first, so these are called without them.
"""

import numpy as np
import pytest
from entry_points import ENTRY_POINTS
from ktforge._native import ffi, lib

N, K = 32, 128
BYTES = np.zeros(N * K * 4, np.uint8)
OUT = np.full(N * K * 4, 0x5A, np.uint8)


def source(kind):
    return ffi.cast(kind, ffi.from_buffer(BYTES))


def out(kind):
    return ffi.cast(kind, ffi.from_buffer(OUT))


def absmax(k=K, stride=K, bits=8):
    return lib.ktq_absmax(source("uint16_t *"), N, k, stride, bits, out("int8_t *"), out("float *"), ffi.NULL)


def pack(n=N, k=K, bits=4):
    return lib.ktq_kt_amx_pack(source("int8_t *"), n, k, bits, out("int8_t *"))


def unpack(n=N, k=K, bits=4):
    return lib.ktq_kt_amx_unpack(source("int8_t *"), n, k, bits, out("int8_t *"))


def group(k=K, stride=K, bits=4, size=32, narrow=0, zeros=False):
    return lib.ktq_group(
        source("uint16_t *"), N, k, stride, bits, size, narrow, 1, out("int8_t *"), out("float *"),
        out("int8_t *") if zeros else ffi.NULL, ffi.NULL,
    )  # fmt: skip


def search(k=K, stride=K, bits=4, size=32, candidates=3):
    return lib.ktq_search(
        source("uint16_t *"), N, k, stride, bits, size, ffi.NULL, source("float *"), candidates, 1.0, 1,
        ffi.new("float[]", 2 * K + 16), out("int8_t *"), out("float *"), ffi.NULL,
    )  # fmt: skip


def product(k=8, b_row=8, c_row=8):
    ones = ffi.new("float[]", [1e12] * 64)  # what is there is large: less would be lost in it
    return lib.ktq_product(ones, k, 1, ones, b_row, out("float *"), c_row, 8, k, 8)


def factor(k=8):
    moments = np.eye(8, dtype=np.float32)
    OUT[:] = 0x5A
    OUT[: moments.nbytes] = moments.view(np.uint8).ravel()
    before = OUT.copy()
    status = lib.ktq_factor(out("float *"), k, 0.01, ffi.new("double[]", 8 * (8 + 128)))
    if np.array_equal(OUT, before):
        OUT[:] = 0x5A
    return status


def feedback(k=K, stride=K, bits=4, size=32):
    order = ffi.new("uint32_t[]", list(range(K)))
    return lib.ktq_feedback(
        source("uint16_t *"), N, k, stride, bits, size, order, ffi.new("float[]", K * K), source("float *"), 1.0,
        ffi.new("float[]", 32 * (K + 64)), out("int8_t *"), ffi.NULL,
    )  # fmt: skip


def from_bf16(n=N, k=K, stride=K, bits=4):
    return lib.ktq_kt_amx_from_bf16(
        source("uint16_t *"), n, k, stride, bits, out("int8_t *"), out("float *"), ffi.NULL
    )  # fmt: skip


def from_fp8(n=N, k=K, stride=K, bits=4, rows=16, cols=16):
    blocks = ffi.new(
        "struct ktq_blocks *",
        {"scale": source("float *"), "stride": 8, "rows": rows, "cols": cols, "row0": 0, "col0": 0},
    )
    return lib.ktq_kt_amx_from_fp8(
        source("uint8_t *"), n, k, stride, blocks, bits, out("int8_t *"), out("float *"), ffi.NULL
    )  # fmt: skip


def fp8(rows=16, cols=16):
    return lib.ktq_fp8_to_bf16(source("uint8_t *"), N, K, source("float *"), 8, rows, cols, out("uint16_t *"))


def nibbles_to_bf16(k=K, cols=32):
    return lib.ktq_nibbles_to_bf16(
        source("uint8_t *"), N, k, source("float *"), source("float *"), 4, cols, out("uint16_t *")
    )  # fmt: skip


def nibbles_pack(count=64):
    return lib.ktq_nibbles_pack(source("int8_t *"), count, out("uint8_t *"))


def nibbles_unpack(count=64):
    return lib.ktq_nibbles_unpack(source("uint8_t *"), count, out("int8_t *"))


#: A call that is right but for these.
WRONG = [
    (absmax, [{"stride": K - 1}, {"bits": 5}, {"bits": 0}, {"bits": 16}]),
    (pack, [{"n": 31}, {"n": 48}, {"k": 64}, {"k": 192}, {"bits": 5}, {"bits": 8, "k": 96}]),
    (unpack, [{"n": 31}, {"n": 48}, {"k": 64}, {"k": 192}, {"bits": 5}, {"bits": 8, "k": 96}]),
    (group, [{"stride": K - 1}, {"size": 0}, {"bits": 5}, {"bits": 0}, {"narrow": 1, "zeros": True}]),
    (search, [{"stride": K - 1}, {"size": 0}, {"bits": 5}, {"bits": 0}, {"candidates": 0}]),
    (product, [{"b_row": 7}, {"c_row": 7}]),
    (factor, [{"k": 0}]),
    (feedback, [{"stride": K - 1}, {"size": 0}, {"bits": 5}, {"bits": 0}]),
    (from_bf16, [{"stride": K - 1}, {"n": 16}, {"k": 64}, {"bits": 5}, {"bits": 8, "k": 32}]),
    (from_fp8, [{"stride": K - 1}, {"n": 16}, {"k": 64}, {"bits": 5}, {"rows": 0}, {"cols": 0}]),
    (fp8, [{"rows": 0}, {"cols": 0}]),
    (nibbles_to_bf16, [{"k": K - 1}, {"cols": 0}, {"cols": 31}, {"cols": 1}]),
    (nibbles_pack, [{"count": 1}, {"count": 63}]),
    (nibbles_unpack, [{"count": 1}, {"count": 63}]),
]


@pytest.mark.parametrize(("call", "changes"), [(call, c) for call, all_of in WRONG for c in all_of])
def test_what_does_not_fit_is_refused_and_nothing_is_written(isa, call, changes):
    OUT[:] = 0x5A
    assert call(**changes) == lib.KTQ_BAD_SHAPE
    assert (OUT == 0x5A).all()
    assert call() == lib.KTQ_OK and not (OUT == 0x5A).all()


def test_all_that_can_be_refused_are_here():
    """The others take any number of values."""
    assert len(WRONG) == len(ENTRY_POINTS.keys() - {"ktq_f16_to_bf16", "ktq_f32_to_bf16", "ktq_difference", "ktq_silu"})
