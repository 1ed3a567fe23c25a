"""The kernels on one thread against memcpy and, where they are installed, libggml and torch.

Times are CPU times of the thread. The matrices together are larger than any cache, so all of it comes from memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from inputs import to_fp8, weights
from rounds import Row, best, ratio_row

from ktforge import native
from ktforge.contract.tensors import Part

N, K, COUNT = 1024, 7168, 8
#: Scales that a search tries for each row.
CANDIDATES = 16
SEARCHED = f"bf16 → kt-amx int4, {CANDIDATES} scales tried"
WEIGHTS = N * K * COUNT
GGML = {"Q4_0": (2, 18), "Q8_0": (8, 34)}  # its number of the type, bytes per block of 32


def run(rounds: int) -> list[Row]:
    """GB of bf16 input (or of its like) a second by case, and ratios."""
    cases = _cases()
    seconds = best(cases, rounds, time.thread_time)
    speed = {name: 2 * WEIGHTS / s / 1e9 for name, s in seconds.items()}
    rows = [Row(f"{name}, one thread", f"{value:.2f} GB/s of bf16") for name, value in speed.items()]
    peers = {"int4": ("libggml Q4_0", 2.5, 0.30), "int8": ("libggml Q8_0", 6.0, 0.25)}
    for method, (peer, over_peer, over_memcpy) in peers.items():
        ours = speed[f"bf16 → kt-amx {method}"]
        if peer in speed:
            rows.append(ratio_row(f"bf16 → kt-amx {method}", ours / speed[peer], over_peer, peer))
        rows.append(ratio_row(f"bf16 → kt-amx {method}", ours / speed["memcpy"], over_memcpy, "memcpy"))
    ratio = speed["fp8 → kt-amx int4"] / speed["bf16 → kt-amx int4"]
    rows.append(ratio_row("fp8 block → kt-amx int4", ratio, 0.6, "bf16 → kt-amx int4, per weight"))
    two_steps = speed["bf16 → kt-amx int4 in two steps"]
    rows.append(ratio_row(SEARCHED, speed[SEARCHED] / two_steps, 0.3, "absmax in two steps"))
    rows.append(ratio_row("float32 product in one order", _product(rounds), 0.5, "NumPy's BLAS, one thread"))
    return rows


def _product(rounds: int) -> float:
    """The speed of the product that error feedback is made of, over that of the BLAS that NumPy has."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((1024, 1024), np.float32) for _ in range(2))
    seconds = best({"ours": lambda: native.product(a, b), "theirs": lambda: a @ b}, rounds, time.thread_time)
    return seconds["theirs"] / seconds["ours"]


def _cases() -> dict[str, Callable[[], None]]:
    matrices = [weights((N, K), seed) for seed in range(COUNT)]
    fp8 = [native.Fp8Blocks(*to_fp8(matrix), (128, 128)) for matrix in matrices]
    out, scales, copies = np.zeros(N * K, np.int8), np.zeros(N, np.float32), [m.copy() for m in matrices]
    codes = np.zeros((N, K), np.int8)
    part = Part("up", 0, (0, N), (0, K))

    def memcpy() -> None:
        for to, matrix in zip(copies, matrices, strict=True):
            ctypes.memmove(to.ctypes.data, matrix.ctypes.data, matrix.nbytes)

    def fused(sources: list, bits: int) -> Callable[[], None]:
        def run() -> None:
            for source in sources:
                native.absmax_kt_amx(source, part, bits, out[: N * K * bits // 8], scales)

        return run

    def two_steps() -> None:
        for matrix in matrices:
            native.absmax(matrix, 4, codes, scales)
            native.kt_amx_pack(codes, 4, out[: N * K // 2])

    by_row, factors = scales.reshape(-1, 1), np.linspace(0.4, 1, CANDIDATES, dtype=np.float32)

    def searched() -> None:
        for matrix in matrices:
            native.search(matrix, 4, K, factors, None, codes, by_row, step=16)
            native.kt_amx_pack(codes, 4, out[: N * K // 2])

    cases: dict[str, Callable[[], None]] = {
        "memcpy": memcpy,
        "bf16 → kt-amx int4": fused(matrices, 4),
        "bf16 → kt-amx int8": fused(matrices, 8),
        "fp8 → kt-amx int4": fused(fp8, 4),
        "fp8 → kt-amx int8": fused(fp8, 8),
        "bf16 → kt-amx int4 in two steps": two_steps,
        SEARCHED: searched,
    }
    return {**cases, **_ggml(matrices), **_torch(matrices)}


def _ggml(matrices: list[np.ndarray]) -> dict[str, Callable[[], None]]:
    """libggml converts bf16 rows to float32 and quantises those; 16 rows at a time they stay in the cache."""
    try:
        import libggml
    except ImportError:
        return {}
    (library,) = (Path(libggml.__file__).parent / "lib64").glob("libggml-base.so")
    ggml = ctypes.CDLL(str(library))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_bf16_to_fp32_row.argtypes = [pointer, pointer, number]
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_init.argtypes = [ctypes.c_int]
    rows = 16
    floats, out = np.zeros((rows, K), np.float32), np.zeros(N * K * 34 // 32, np.uint8)

    def quantiser(kind: int, block_bytes: int) -> Callable[[], None]:
        ggml.ggml_quantize_init(kind)

        def run() -> None:
            for matrix in matrices:
                for row in range(0, N, rows):
                    ggml.ggml_bf16_to_fp32_row(matrix[row:].ctypes.data, floats.ctypes.data, rows * K)
                    to = out.ctypes.data + row * K // 32 * block_bytes
                    ggml.ggml_quantize_chunk(kind, floats.ctypes.data, to, 0, rows, K, None)

        return run

    return {f"libggml {name}": quantiser(*arguments) for name, arguments in GGML.items()}


def _torch(matrices: list[np.ndarray]) -> dict[str, Callable[[], None]]:
    """The same codes in eager mode, without packing."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(m.view(np.int16)).view(torch.bfloat16) for m in matrices[:1]]
    assert matrices[0].dtype == ml_dtypes.bfloat16

    def run() -> None:
        for tensor in tensors * COUNT:
            w = tensor.float()
            scale = w.abs().amax(dim=1, keepdim=True) / 112
            q = torch.clamp(torch.round(w / scale), -128, 127)
            (torch.sign(q) * ((q.abs() + 8) // 16)).to(torch.int8)

    return {"torch, eager, quantise only": run}
