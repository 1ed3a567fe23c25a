"""Whether the source files are still those that a run began with."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ktforge import native
from ktforge.contract.plan import Sink
from ktforge.contract.tensors import TensorSpec, UnitSpec
from ktforge.errors import CheckpointError
from ktforge.native.pages import UNREADABLE


class SourceWatch:
    """Remembers size and modification time of the files that a run reads, and counts mapped pages that could not be."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._seen = {path: _look(path) for path in files}
        self._lost_pages = native.lost_pages()

    def check(self, paths: Iterable[Path] | None = None) -> None:
        """Raises CheckpointError if one of these source files (default: any) was changed, cut short or removed."""
        for path in self._seen if paths is None else paths:
            if path not in self._seen:
                continue
            (size, time), (new_size, new_time) = self._seen[path], _look(path)
            if new_size != size:
                raise CheckpointError(f"{path} changed while it was read: it had {size:,} bytes, and has {new_size:,}")
            if new_time != time:
                raise CheckpointError(f"{path} changed while it was read: it was modified")

    def check_pages(self, unit: UnitSpec | None = None) -> None:
        """Raises CheckpointError if what was read (of a unit) may be zeros that stand for a page which is gone."""
        if native.lost_pages() != self._lost_pages:
            self.check()
            raise CheckpointError(UNREADABLE if unit is None else _unreadable(unit))


class WatchedSink:
    """Passes a unit's tensors on to ``sink`` as long as the files that they were made from are as they were."""

    def __init__(self, sink: Sink, watch: SourceWatch, unit: UnitSpec) -> None:
        self._sink, self._watch, self._unit = sink, watch, unit
        self._paths = {t.file for t in unit.tensors.values() if t.file is not None}

    def has(self, tensor: TensorSpec) -> bool:
        return self._sink.has(tensor)

    def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
        self._watch.check(self._paths)
        self._watch.check_pages(self._unit)
        try:
            if row is None:
                self._sink.write(tensor, data)
            else:
                self._sink.write(tensor, data, row)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self._watch.check()  # the system found the page of `data` gone while it was to copy it
            raise CheckpointError(_unreadable(self._unit)) from error
        self._watch.check_pages(self._unit)  # `data` may be mapped pages, which the sink was the first to read


def _look(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read any more: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def _unreadable(unit: UnitSpec) -> str:
    return f"{unit.name}: a part of its file cannot be read: look at the disk's health, or download the file again"
