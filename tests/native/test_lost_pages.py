"""The handler of SIGBUS among other handlers, and the ranges it keeps to: each case of native/test/lost_pages.c."""

import platform
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = [NATIVE / "test" / "lost_pages.c", NATIVE / "src" / "lost_pages.c"]
CASES = re.findall(r'\{"(\w+)", case_', SOURCES[0].read_text())


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("cc") is None or not Path("/proc/self/maps").exists():
        pytest.skip("this needs a C compiler and Linux")
    made = tmp_path_factory.mktemp("lost") / "lost_pages"
    subprocess.run(
        ["cc", "-O1", "-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread", *SOURCES, "-o", made], check=True
    )
    return made


@pytest.mark.parametrize("case", CASES)
def test_what_becomes_of_a_signal(program, tmp_path, case):
    done = subprocess.run([program, case, tmp_path / "file"], capture_output=True, text=True, timeout=60)
    ends_by = signal.SIGBUS if case.startswith("ends_") else 0
    if case == "write" and platform.machine() not in ("x86_64", "AMD64"):
        ends_by = signal.SIGSEGV  # there the handler cannot tell, and the zeros are read-only
    assert (done.returncode, done.stdout) == (-ends_by, "")


def test_there_are_cases():
    assert len(CASES) > 10
