"""Whether an output has room, before its first byte is written."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from ktforge.contract.tensors import FileSpec
from ktforge.disk.marks import PARTIAL, UNFINISHED, staged
from ktforge.disk.system import quota_left
from ktforge.text import size_text


def shortages(folder: Path, specs: Sequence[FileSpec]) -> Iterator[str]:
    """What is too little for these files in ``folder``: bytes, file names, or the largest file that is allowed.

    The system counts as free what this user may write, by the file system's reserve and by quotas of projects; those of
    users and groups are asked for. What an unfinished output holds already needs no more room. An output that is to be
    replaced frees none, since it stays until the new one is complete.
    """
    free, existing = free_space(folder)
    needed = sum(f.nbytes for f in specs) - _held(folder, specs)
    if free < needed:
        yield (
            f"the output needs {size_text(needed)}, but only {size_text(free)} are free at {existing}: "
            "make room or write elsewhere"
        )
    allowed = quota_left(existing)
    if allowed is not None and allowed < needed:
        yield (
            f"the output needs {size_text(needed)}, but your quota leaves {size_text(allowed)} at {existing}: "
            "make room or write elsewhere"
        )
    system = os.statvfs(existing)
    if system.f_files and system.f_favail < len(specs):  # some file systems have no fixed number and say 0
        yield (
            f"the output has {len(specs):,} files, but {existing} has room for {system.f_favail:,} more: "
            "remove files there or write elsewhere"
        )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max((f.nbytes for f in specs), default=0)
    if limit != resource.RLIM_INFINITY and largest > limit:
        yield (
            f"the output has files of {size_text(largest)}, but `ulimit -f` allows {size_text(limit)}: "
            "raise it, or write smaller shards"
        )


def free_space(folder: Path) -> tuple[int, Path]:
    """The bytes that this user may write where ``folder`` is or will be, and the folder there that exists."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free, existing


def _held(folder: Path, specs: Sequence[FileSpec]) -> int:
    """Bytes on the disk for these files; a file that grows is as long as it will be, but has holes."""
    total = 0
    if (folder / PARTIAL).is_dir():
        is_marked = (folder / UNFINISHED).exists()
        for file in specs:
            path = staged(folder / PARTIAL, file.path)
            if is_marked and not path.exists():
                path = folder / file.path
            if path.is_file():
                total += min(file.nbytes, path.stat().st_blocks * 512)
    return total
