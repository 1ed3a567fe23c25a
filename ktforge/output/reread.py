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
from ktforge.disk.folders import Folders
from ktforge.disk.journal import Journal
from ktforge.disk.marks import PARTIAL, staged
from ktforge.disk.reading import content_hash, open_regular
from ktforge.errors import OutputError
from ktforge.output.hashing import add_range


def check_file(
    path: Path, file: FileSpec, written: Mapping[str, str], damaged: str, folders: Folders, *, cold: bool = False
) -> None:
    """Raises OutputError, with ``damaged`` for a mend, if a file is not what was ``written`` of it (tensor → xxh3-128).

    ``cold``: from the disk itself, as far as the system lets go of what it keeps in memory.
    """
    offset = len(file.header)
    with open_regular(path, folders) as opened:
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


def check_documents(
    folder: Path, documents: Mapping[str, str], damaged: str, folders: Folders, *, cold: bool = False
) -> None:
    """The same of what is ready to be published beside the weights, or has been (name → xxh3-128); publishing itself
    tells of one that is missing."""
    for name, digest in documents.items():
        path = staged(folder / PARTIAL, name)
        path = path if folders.exists(path) else folder / name
        if folders.exists(path):
            with open_regular(path, folders) as opened:
                if cold:
                    system.forget(opened.fileno())
                if content_hash(opened) != digest:
                    raise OutputError(f"{path} is not what was written, so {damaged}")


#: What to do where a disk gives back other bytes than it was given.
_FAILING = (
    "the disk or the memory may be failing: nothing was published, and what was written is discarded; look at both, "
    "then run the same command again"
)


def check_staged(folder: Path, files: Iterable[FileSpec], journal: Journal, workers: int, folders: Folders) -> None:
    """The same of an output that is ready to be published, read from the disk with so many threads."""
    check_documents(folder, journal.documents, _FAILING, folders, cold=True)
    checks = [
        partial(check_file, path, file, journal.written, _FAILING, folders, cold=True)
        for file in files
        if folders.exists(path := staged(folder / PARTIAL, file.path))  # else a run before this one has published it
    ]
    with ThreadPoolExecutor(workers) as threads:
        for done in [threads.submit(check) for check in checks]:
            done.result()
