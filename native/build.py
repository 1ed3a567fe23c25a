"""Builds the C library as the cffi API-mode extension ``ktforge._native``.

cffi gives every source of an extension the same flags; :class:`BuildExt` takes those that the target can run and adds
the flags of its folder to each, so that only the code which runs after a CPU check may use that CPU's instructions.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cffi import FFI
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

HERE = Path(__file__).parent
#: Says what a compiler makes code for.
TARGET = HERE / "src" / "target.h"
COMMON_FLAGS = ["-O3", "-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
ISA_FLAGS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
    "neon": [],
}


def in_project(paths: Sequence[Path]) -> list[str]:
    """Paths as setuptools wants them."""
    return [p.relative_to(HERE.parent).as_posix() for p in sorted(paths)]


ffi = FFI()
ffi.cdef((HERE / "include" / "ktq_api.h").read_text())
ffi.set_source(
    "ktforge._native",
    '#include <stddef.h>\n#include <stdint.h>\n#include "ktq_api.h"',
    sources=in_project([*HERE.glob("src/**/*.c")]),  # of every target, since a source distribution is for all of them
    libraries=["m"],
    include_dirs=in_project([HERE / "include"]),
    depends=in_project([*HERE.glob("**/*.h")]),
)


def isa_folders(compiler: Sequence[str]) -> set[str]:
    """The folders of instruction sets that the code of a compiler's command can use. Raises PlatformError with a
    sentence if that is not supported."""
    if compiler.count("-arch") > 1:
        raise PlatformError(
            "ktforge is built for one architecture at a time, since each has instructions of its own: "
            'ARCHFLAGS="-arch $(uname -m)" pip install …'
        )
    try:
        done = subprocess.run([*compiler, "-E", "-dM", TARGET], capture_output=True, text=True)
    except OSError as error:
        raise PlatformError(
            f"ktforge is compiled with GCC or Clang, and {compiler[0]} cannot be run ({error.strerror}): install one "
            "(`apt install gcc`, `dnf install gcc`, `xcode-select --install`), or name yours with CC=…"
        ) from error
    if done.returncode:
        refused = re.search(r'#error "(.*)"', done.stderr)
        raise PlatformError(refused[1] if refused else f"ktforge needs GCC or Clang: {done.stderr.strip()[-500:]}")
    named = re.search(r"^#define KTQ_FOLDERS\b(.*)$", done.stdout, re.MULTILINE)
    assert named, done.stdout
    return {"scalar", *named[1].split()}


def check_headers(folders: Sequence[str]) -> None:
    """Raises PlatformError if none of the folders has Python's own headers."""
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        raise PlatformError(
            f"ktforge is compiled with Python's headers, and there is no Python.h in {' or '.join(folders)}: install "
            "them (`apt install python3-dev`, `dnf install python3-devel`)"
        )


class BuildExt(build_ext):
    """Compiles what the target can run, each file with the common flags and those of its folder."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type != "unix":
            raise PlatformError("ktforge is for Linux and macOS, with GCC or Clang: on Windows, use it within WSL")
        others = ISA_FLAGS.keys() - isa_folders(self.compiler.compiler_so)
        check_headers(self.include_dirs)
        ext.sources = [s for s in ext.sources if Path(s).parent.name not in others]
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, suffix, cc_args, extra_postargs, pp_opts):
            flags = COMMON_FLAGS + ISA_FLAGS.get(Path(src).parent.name, [])
            compile_one(obj, src, suffix, cc_args, extra_postargs + flags, pp_opts)

        self.compiler._compile = compile_with_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one
