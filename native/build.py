"""Builds the C library as the cffi API-mode extension ``ktforge._native``.

cffi gives every source of an extension the same flags; :class:`BuildExt` adds those of its folder to each file, so
that only the code which runs after a CPU check may use that CPU's instructions.
"""

from __future__ import annotations

import platform
from pathlib import Path

from cffi import FFI
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
COMMON_FLAGS = ["-O3", "-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
ISA_FLAGS = {
    "scalar": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}
X86 = {"avx2", "avx512"}
#: The instruction-set folders beside ``scalar`` for each machine, by platform's name of it.
FOLDERS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon"}, "arm64": {"neon"}}


def sources() -> list[str]:
    """Paths of the C files for this machine, relative to the project, as setuptools wants them."""
    folders = {"src", "scalar"} | FOLDERS.get(platform.machine(), set())
    found = sorted(p for p in (HERE / "src").rglob("*.c") if p.parent.name in folders)
    return [p.relative_to(HERE.parent).as_posix() for p in found]


ffi = FFI()
ffi.cdef((HERE / "include" / "ktq_api.h").read_text())
ffi.set_source(
    "ktforge._native",
    '#include <stddef.h>\n#include <stdint.h>\n#include "ktq_api.h"',
    sources=sources(),
    libraries=["m"],
    include_dirs=[(HERE / "include").relative_to(HERE.parent).as_posix()],
    depends=[p.relative_to(HERE.parent).as_posix() for p in sorted(HERE.rglob("*.h"))],
)


class BuildExt(build_ext):
    """Compiles each file with the common flags and those of its ISA folder."""

    def build_extension(self, ext) -> None:
        compile_one = self.compiler._compile

        def compile_with_flags(obj, src, suffix, cc_args, extra_postargs, pp_opts):
            flags = COMMON_FLAGS + ISA_FLAGS.get(Path(src).parent.name, [])
            compile_one(obj, src, suffix, cc_args, extra_postargs + flags, pp_opts)

        self.compiler._compile = compile_with_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one
