"""The AVX-512 kernels on any x86-64: compiled against an emulating header and compared with the scalar ones."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ktforge import native

SCRIPT = Path(__file__).parents[2] / "native" / "test" / "build.sh"


def simde_is_there() -> bool:
    probe = ["cc", "-E", "-include", "simde/x86/avx512.h", "-x", "c", "/dev/null", "-o", "/dev/null"]
    return shutil.which("cc") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX-512 is x86-64's")
@pytest.mark.skipif(not native.isas().get("avx2", False), reason="the emulation itself needs a CPU with AVX2")
def test_emulated_avx512_equals_scalar(tmp_path):
    if not simde_is_there():
        pytest.skip("simde's headers or a C compiler are missing: apt-get install libsimde-dev gcc")
    subprocess.run(["sh", SCRIPT, "avx512", tmp_path], check=True)
    done = subprocess.run([tmp_path / "compare", "40", "avx2", "avx512"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "avx2 equals scalar\navx512 equals scalar\n")
