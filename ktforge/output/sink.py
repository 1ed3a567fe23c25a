"""Tensors of an output, placed in their files from any thread and in any order."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from ktforge import native
from ktforge.contract.tensors import FileSpec, TensorSpec
from ktforge.disk import system, writing
from ktforge.disk.journal import Journal
from ktforge.disk.lock import Lock
from ktforge.disk.marks import staged
from ktforge.errors import CheckpointError, PluginError
from ktforge.native.pages import UNREADABLE
from ktforge.output.hashing import Growing

#: Seconds of work that a power cut may cost: so often, what was written is synced and noted in the journal.
SAVE_EVERY = 20.0
#: Bytes that are hashed and written at a time. Doing one after the other with a whole tensor took twice the CPU time.
PIECE = 1 << 20
#: Complete files that may wait for that, so that no run holds more open than a process may have.
MAX_WAITING = 16


class FolderSink:
    """Places tensors of planned files with pwrite, from any thread and in any order."""

    def __init__(self, staging: Path, specs: tuple[FileSpec, ...], journal: Journal, lock: Lock) -> None:
        self._staging, self._journal, self._held = staging, journal, lock
        self._kept = frozenset(journal.written)
        self._place: dict[str, tuple[FileSpec, int]] = {}
        self._growing: dict[str, Growing] = {}
        self._left: dict[str, int] = {}
        for file in specs:
            offset = len(file.header)
            for tensor in file.tensors:
                if tensor.name not in self._kept:
                    self._place[tensor.name] = file, offset
                    self._left[file.path] = self._left.get(file.path, 0) + 1
                offset += tensor.nbytes
        self._opening = threading.Lock()  # one file at a time
        self._lock = threading.Lock()  # of all that follows
        self._open: dict[str, int] = {}
        self._complete: set[str] = set()
        self._unsaved: dict[str, str] = {}
        self._saving = threading.Lock()  # one at a time; only its holder closes descriptors
        self._saved = time.monotonic()
        self._lost = False
        self._lost_pages = native.lost_pages()

    def has(self, tensor: TensorSpec) -> bool:
        """Whether an earlier run has put this tensor in its place."""
        return tensor.name in self._kept

    def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
        """Leaves a tensor alone that :meth:`has` is true of.

        Raises PluginError for a tensor that is not planned, already written, or of another size.
        """
        if tensor.name in self._kept:
            return
        if row is not None:
            self._write_rows(tensor, data, row)
            return
        with self._lock:
            if tensor.name not in self._place:
                raise PluginError(f"{tensor.name} was written twice or never planned")
            file, offset = self._place.pop(tensor.name)
        if data.nbytes != tensor.nbytes:
            raise PluginError(f"{tensor.name} has {data.nbytes:,} bytes; {tensor.nbytes:,} were planned")
        found = xxhash.xxh3_128()
        self._put(file, offset, data, found)
        self._written(file, tensor.name, found.hexdigest())

    def _write_rows(self, tensor: TensorSpec, data: np.ndarray, row: int) -> None:
        with self._lock:
            if tensor.name not in self._place:
                raise PluginError(f"{tensor.name} was written twice or never planned")
            file, offset = self._place[tensor.name]
            growing = self._growing.setdefault(tensor.name, Growing(tensor))
        begin = row * (tensor.nbytes // tensor.shape[0])
        if begin + data.nbytes > tensor.nbytes:
            raise PluginError(f"{tensor.name} has {tensor.nbytes:,} bytes; rows up to {begin + data.nbytes:,} came")
        found = growing.turn(begin)
        self._put(file, offset + begin, data, found)
        if growing.add(begin, data.nbytes, found is not None, self._descriptor(file), offset):
            with self._lock:
                del self._place[tensor.name], self._growing[tensor.name]
            self._written(file, tensor.name, growing.found.hexdigest())

    def _put(self, file: FileSpec, offset: int, data: np.ndarray, found: xxhash.xxh3_128 | None) -> None:
        """Writes an array and adds it to a hash, in pieces that are in the cache when they are read again."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        descriptor, path = self._descriptor(file), staged(self._staging, file.path)
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE]
            if found is not None:
                found.update(piece)
            writing.write_at(descriptor, piece, offset + start, path)
        system.write_back(descriptor, offset, data.nbytes)

    def finish(self) -> None:
        """Syncs and closes all files.

        Raises PluginError if a tensor is missing, CheckpointError if one may have zeros in the place of a lost page.
        """
        if self._place:
            missing = next(iter(self._place))
            raise PluginError(f"{missing} was planned but never written (one of {len(self._place):,} tensors)")
        self._save()
        if native.lost_pages() != self._lost_pages:
            raise CheckpointError(UNREADABLE)

    def close(self) -> None:
        """Saves what can be saved, for the next run, and closes all files."""
        with suppress(OSError):
            self._save()
        with self._saving, self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def _descriptor(self, file: FileSpec) -> int:
        with self._lock:
            descriptor = self._open.get(file.path)
        if descriptor is not None:
            return descriptor
        with self._opening:  # which may take a while, and is no business of those who write to other files
            with self._lock:
                descriptor = self._open.get(file.path)
            if descriptor is None:
                descriptor = self._create(file)
                with self._lock:  # now that it has its header
                    self._open[file.path] = descriptor
        return descriptor

    def _create(self, file: FileSpec) -> int:
        self._held.check()
        path = staged(self._staging, file.path)
        writing.make_folders(path.parent, self._held.folders)
        descriptor = writing.create(path, file.nbytes, self._held.folders)
        try:
            writing.write_at(descriptor, bytes(file.header), 0, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _written(self, file: FileSpec, name: str, digest: str) -> None:
        with self._lock:
            self._unsaved[name] = digest
            self._left[file.path] -= 1
            if not self._left[file.path]:
                self._complete.add(file.path)
            waiting = len(self._complete)
        if waiting >= MAX_WAITING or time.monotonic() - self._saved >= SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        """Syncs what was written, notes it in the journal, and closes the files that are complete.

        A sync that fails may have lost what it was to write, and the next one would not say so. From then on nothing is
        noted, so that the next run writes it again. Nor is anything once a mapped page was lost, since what was copied
        from it is zeros.
        """
        with self._saving:
            if self._lost:
                return
            with self._lock:
                unsaved, self._unsaved = self._unsaved, {}
                complete, self._complete = self._complete, set()
                opened = dict(self._open)
                self._saved = time.monotonic()
            if not unsaved or native.lost_pages() != self._lost_pages:  # counted before any of these was written
                return
            paths = {path: staged(self._staging, path) for path in opened}
            self._lost = True
            for path, descriptor in opened.items():
                writing.sync(descriptor, paths[path])
            for folder in {p.parent for p in paths.values()}:
                writing.sync_folder(folder, self._held.folders)
            self._journal.add(unsaved)
            self._lost = False
            for path in complete:
                with self._lock:
                    descriptor = self._open.pop(path)
                os.close(descriptor)
