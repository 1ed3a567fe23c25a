"""Every function with zeros of both signs, subnormals and values at the ends: the same bits from every instruction set,
and whatever floating-point environment the caller's thread has."""

import ctypes
import platform
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from entry_points import ENTRY_POINTS, made_by, public_functions

from ktforge import native

SOURCES = Path(__file__).parents[2] / "native" / "src"
#: <fenv.h>'s FE_UPWARD.
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())


def test_every_public_function_is_here():
    assert public_functions() == set(ENTRY_POINTS)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_instruction_set_gives_the_bits_of_scalar(isa, name):
    got = made_by(name)
    native.use_isa("scalar")
    assert got == made_by(name)


def test_a_group_of_zeros_of_both_signs_has_the_scale_zero(isa):
    weight = np.full((4, 32), 0x8000, np.uint16)
    weight[0, 0] = weight[1, 31] = weight[2] = 0x0000
    codes, scales = np.empty((4, 32), np.int8), np.empty((4, 1), np.float32)
    native.group(weight.view("bfloat16"), 4, 32, False, codes, scales)
    assert not codes.any() and not scales.view(np.uint32).any()


@contextmanager
def subnormals_are_zeros():
    assert torch.set_flush_denormal(True)
    try:
        yield lambda: float(torch.tensor(1e-30) * 1e-10) == 0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def rounding_upward():
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    assert libm.fesetround(UPWARD) == 0
    try:
        yield lambda: libm.fegetround() == UPWARD
    finally:
        libm.fesetround(before)


@pytest.mark.skipif(UPWARD is None, reason="the number of that mode is known for two architectures")
@pytest.mark.parametrize("environment", [subnormals_are_zeros, rounding_upward])
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_foreign_floating_point_environment_changes_nothing_and_stays(isa, name, environment):
    calls = ENTRY_POINTS[name]
    want = made_by(name)
    with environment() as still_there:
        got = [array.tobytes() for array in calls()]
        stayed = still_there()
    assert got == want and stayed


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only", "-funsafe-math-optimizations"])
def test_no_source_compiles_where_floats_are_not_exact(flag):
    for source in [*SOURCES.glob("scalar/*.c"), SOURCES / "dispatch.c", SOURCES / "kt_amx.c"]:
        done = subprocess.run(["cc", flag, "-fsyntax-only", source], capture_output=True, text=True)
        assert done.returncode != 0 and "-ffast-math and its parts do not" in done.stderr, source
