"""What was written, read from the disk again and compared with the hashes that it was written with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from ktforge.contract.tensors import FileSpec
from ktforge.disk import system
from ktforge.disk.marks import PARTIAL, staged
from ktforge.disk.reading import open_regular
from ktforge.errors import OutputError
from ktforge.output.hashing import add_range


def check_file(path: Path, file: FileSpec, written: Mapping[str, str], damaged: str, *, cold: bool = False) -> None:
    """Raises OutputError, with ``damaged`` for a mend, if a file is not what was ``written`` of it (tensor → xxh3-128).

    ``cold``: from the disk itself, as far as the system lets go of what it keeps in memory.
    """
    offset = len(file.header)
    with open_regular(path) as opened:
        if cold:
            system.forget(opened.fileno())
        if os.pread(opened.fileno(), offset, 0) != bytes(file.header):
            raise OutputError(f"{path}: the header is not what was written, so {damaged}")
        for tensor in file.tensors:
            if tensor.name in written:
                found = xxhash.xxh3_128()
                add_range(found, opened.fileno(), offset, tensor.nbytes)
                if found.hexdigest() != written[tensor.name]:
                    raise OutputError(f"{path}: {tensor.name} is not what was written, so {damaged}")
            offset += tensor.nbytes


def check_staged(folder: Path, files: Iterable[FileSpec], written: Mapping[str, str], workers: int) -> None:
    """The same of all files of an output that has not been published, with so many threads."""
    damaged = (
        "the disk or the memory may be failing: nothing was published; look at both, then start over with --restart"
    )
    checks = [
        partial(check_file, path, file, written, damaged, cold=True)
        for file in files
        if (path := staged(folder / PARTIAL, file.path)).exists()  # else a run before this one has published it
    ]
    with ThreadPoolExecutor(workers) as threads:
        for done in [threads.submit(check) for check in checks]:
            done.result()
