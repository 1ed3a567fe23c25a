"""What is compiled is decided by the compiler's target, in one place; what is not supported says so in a sentence."""

import importlib.util
import platform
import re
from pathlib import Path

import pytest
from setuptools.errors import PlatformError

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OF_X86 = ["-U__aarch64__", "-D__x86_64__"]
OF_ARM = ["-U__x86_64__", "-D__aarch64__"]


@pytest.mark.parametrize(
    ("flags", "folders"),
    [(OF_X86, {"avx2", "avx512"}), (OF_ARM, {"neon"}), (["-U__x86_64__", "-U__aarch64__"], set())],
)
def test_the_target_decides_and_not_the_machine(build, monkeypatch, flags, folders):
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    assert build.isa_folders(["cc", *flags]) == {"scalar", *folders}


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (["cc", "-D_WIN32"], "ktforge is for Linux and macOS: on Windows, use it within WSL"),
        (["cc", "-U__LP64__"], "ktforge needs a 64-bit system: it maps files that are larger than 4 GB"),
        (["cc", "-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"], "ktforge needs a little-endian CPU: .*"),
        (["clang", "-arch", "x86_64", "-arch", "arm64"], "ktforge is built for one architecture at a time, .*"),
        (
            ["no-such-compiler"],
            "ktforge is compiled with GCC or Clang, and no-such-compiler cannot be run .No such file.*",
        ),
        (["cc", "--no-such-option"], "ktforge needs GCC or Clang: .*no-such-option.*"),
    ],
)
def test_what_is_not_supported_says_so(build, compiler, message):
    with pytest.raises(PlatformError) as caught:
        build.isa_folders(compiler)
    assert re.fullmatch(message, str(caught.value), re.DOTALL)


def test_pythons_headers_are_looked_for(build, tmp_path):
    with pytest.raises(PlatformError, match=f"no Python.h in {tmp_path}: install them"):
        build.check_headers([str(tmp_path)])
    (tmp_path / "Python.h").touch()
    build.check_headers(["nowhere", str(tmp_path)])


def test_one_architecture_that_is_named_is_no_universal_build(build, tmp_path):
    compiler = tmp_path / "clang"  # as macOS has it
    compiler.write_text('#!/bin/sh\nshift 2\nexec cc "$@"\n')
    compiler.chmod(0o755)
    assert "scalar" in build.isa_folders([str(compiler), "-arch", "arm64"])


def test_nothing_else_asks_what_the_target_is():
    asked = re.compile(r"__x86_64__|__aarch64__|_M_X64|platform\.machine")
    files = [f for f in NATIVE.rglob("*") if f.suffix in {".c", ".h", ".py"} and f.name != "target.h"]
    assert files and not [f for f in files if asked.search(f.read_text())]


def test_every_folder_has_flags_and_a_source_distribution_has_them_all(build):
    folders = {f.name for f in (NATIVE / "src").iterdir() if f.is_dir()}
    assert folders == set(build.ISA_FLAGS)
    _, _, _, kwds = build.ffi._assigned_source
    assert {Path(s).parent.name for s in kwds["sources"]} == {"src", *folders}
