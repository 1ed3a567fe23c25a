"""The comparison in C of every instruction set with scalar, which is how AVX-512 is tested on any x86-64: compiled
against an emulating header."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ktforge import native

NATIVE = Path(__file__).parents[2] / "native"
FUNCTIONS = re.findall(r"^    X\(isa, \w+, (\w+),", (NATIVE / "src" / "table.h").read_text(), re.MULTILINE)

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX-512 is x86-64's"),
    pytest.mark.skipif(not native.isas().get("avx2", False), reason="the emulation itself needs a CPU with AVX2"),
]


def simde_is_there() -> bool:
    probe = ["cc", "-E", "-include", "simde/x86/avx512.h", "-x", "c", "/dev/null", "-o", "/dev/null"]
    return shutil.which("cc") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the program and its object files."""
    if not simde_is_there():
        pytest.skip("simde's headers or a C compiler are missing: apt-get install libsimde-dev gcc")
    folder = tmp_path_factory.mktemp("compare")
    subprocess.run(["sh", NATIVE / "test" / "build.sh", "avx512", folder], check=True)
    return folder


def test_emulated_avx512_equals_scalar(built):
    done = subprocess.run([built / "compare", "40", "avx2", "avx512"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx2 equals scalar\navx512 equals scalar\n")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_comparison_sees_every_function_of_a_table(built, tmp_path, function):
    """One that does nothing, in its place in the table, is a difference."""
    assert len(FUNCTIONS) > 10
    replaced = [f"-Dktq_avx2_{function}=ktq_broken_{function}", NATIVE / "src" / "avx2" / "table.c"]
    others = [o for o in built.glob("*.o") if "avx2_table" not in o.name]
    table, broken, program = (tmp_path / name for name in ("table.o", "broken.o", "compare"))
    subprocess.run(["cc", "-c", *replaced, "-o", table], check=True)
    subprocess.run(["cc", "-w", "-c", NATIVE / "test" / "broken.c", "-o", broken], check=True)
    subprocess.run(["cc", "-static", table, broken, *others, "-lm", "-o", program], check=True)
    done = subprocess.run([program, "8", "avx2"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("avx2 differs from scalar: ")
