"""Whether the source files are still those that a run began with."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ktforge import native
from ktforge.contract.identity import Identity
from ktforge.contract.plan import Sink
from ktforge.contract.tensors import TensorSpec, UnitSpec
from ktforge.errors import CheckpointError
from ktforge.native.pages import UNREADABLE


class SourceWatch:
    """Knows which files a run was planned with, and counts mapped pages that could not be read.

    Raises CheckpointError, as :meth:`check` does, if one of them is another by now.
    """

    def __init__(self, files: Mapping[Path, Identity]) -> None:
        self._files = files
        self._lost_pages = native.lost_pages()
        self.check()

    def check(self, paths: Iterable[Path] | None = None) -> None:
        """Raises CheckpointError if one of these source files (default: any) was changed, replaced or removed."""
        for path in self._files if paths is None else paths:
            if path in self._files:
                self._files[path].check(path, _look(path))

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


def _look(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read any more: {error.strerror}") from error


def _unreadable(unit: UnitSpec) -> str:
    return f"{unit.name}: a part of its file cannot be read: look at the disk's health, or download the file again"
