"""An output folder that is either finished or says that it is not. Folder writers build on this.

Everything grows below ``.ktforge-partial`` under names that no weight loader picks up. A journal there says what is
in place, so that a run which was cut off, by an error or by ``kill -9``, goes on where it stopped.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ktforge import fileio, files, native
from ktforge.checkpoint import PARTIAL, UNFINISHED
from ktforge.errors import CheckpointError, OutputError, PluginError
from ktforge.growing import Growing, add_range
from ktforge.journal import JOURNAL, Journal, check_unchanged, fingerprint
from ktforge.lock import held, locked
from ktforge.publish import discard, nested_weights, publish, published, stage_documents, staged
from ktforge.sizes import counted
from ktforge.sourcewatch import UNREADABLE
from ktforge.tensors import FileSpec, TensorSpec

if TYPE_CHECKING:
    from ktforge.plan import Plan

#: Seconds of work that a power cut may cost: so often, what was written is synced and noted in the journal.
SAVE_EVERY = 20.0
#: Bytes that are hashed and written at a time. Doing one after the other with a whole tensor took twice the CPU time.
PIECE = 1 << 20
#: Complete files that may wait for that, so that no run holds more open than a process may have.
MAX_WAITING = 16


def check_output(folder: Path, source: Path | None) -> list[str]:
    """Why this folder cannot take an output at all, one sentence each; empty if it can."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file: give a folder for the output"]
    above = next(p for p in folder.absolute().parents if p.exists())
    if not above.is_dir():
        return [f"{folder} would lie below {above}, which is a file: give another folder for the output"]
    if (folder / PARTIAL).is_symlink():
        return [f"{folder / PARTIAL} is a symbolic link, which ktforge does not make: remove it"]
    if source is not None:
        here, there = folder.resolve(), source.resolve()
        if here == there or here in there.parents or there in here.parents:
            return [f"the output {folder} and the checkpoint {source} overlap: choose another folder"]
    return nested_weights(folder)


def is_unfinished(folder: Path) -> bool:
    """Whether the same command would go on with what is in ``folder``."""
    return bool(Journal(folder / PARTIAL / JOURNAL).fingerprint)


def outlook(folder: Path, plan: Plan) -> str | None:
    """What a run of ``plan`` would do about what is in ``folder`` already, in one sentence; None if that is nothing.

    Raises CheckpointError if a source file is no longer the one that was planned with.
    """
    if other := held(folder / PARTIAL):
        return other
    journal = Journal(folder / PARTIAL / JOURNAL)
    if journal.fingerprint:
        again = _again(folder, journal)
        try:
            check_unchanged(folder, journal.fingerprint, fingerprint(plan), again)
        except OutputError as error:
            changes = "; ".join(error.problems[:-1])
            return f"{folder} holds an unfinished output that cannot go on ({changes}): {again} discards it"
        needs = "" if _may_replace(folder, journal, overwrite=False, goes_on=True) else " with --overwrite"
        count = sum(len(f.tensors) for f in plan.files)
        return (
            f"{folder} holds an unfinished output of this pipeline: the run goes on{needs} behind "
            f"{len(journal.written):,} of {counted(count, 'tensor')}; --restart begins anew"
        )
    if not _may_replace(folder, journal, overwrite=False, goes_on=False):
        return f"{folder} is not empty: the run needs --overwrite, which replaces its weights at the end"
    return None


def _may_replace(folder: Path, journal: Journal, *, overwrite: bool, goes_on: bool) -> bool:
    """Whether a run may put its files beside what ``folder`` holds, or in its place."""
    if overwrite or (goes_on and (journal.overwrite or journal.staged)) or (folder / UNFINISHED).exists():
        return True
    return not (folder.exists() and any(p.name != PARTIAL for p in folder.iterdir()))


def _again(folder: Path, journal: Journal) -> str:
    """The options with which a run discards the unfinished output in ``folder`` and begins anew."""
    alone = _may_replace(folder, journal, overwrite=False, goes_on=False)
    return "--restart" if alone else "--restart --overwrite"


@contextmanager
def open_folder(
    folder: Path,
    plan: Plan,
    documents: Mapping[str, bytes],
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = False,
) -> Iterator[FolderSink]:
    """A sink for the files of ``plan``; on a clean exit the folder is complete, after an exception it can go on.

    ``documents`` are further files by name, such as an index. A folder that holds an unfinished output of the same
    plan keeps the tensors that it has; ``restart`` begins anew, ``verify`` reads them and compares their hashes.
    ``overwrite`` replaces what a folder holds, which stays until the new files are complete. A plan whose loader names
    no source files leaves nothing behind after an exception, since the next run could not tell what it was made from.

    Raises OutputError if the folder cannot be written or its unfinished output was made from something else,
    PluginError if a planned tensor was never written.
    """
    problems = check_output(folder, plan.pipeline.loader.folder())
    if problems:
        raise OutputError(*problems)
    paths = published(plan, documents)
    _check_paths(paths)
    existed, staging = folder.exists(), folder / PARTIAL
    try:
        with locked(staging):
            journal = _open_journal(folder, plan, overwrite=overwrite, restart=restart)
            sink = FolderSink(staging, plan.files, journal)
            try:
                _check_kept(folder, plan.files, journal, verify=verify)
                yield sink
                sink.finish()
                if not journal.staged:
                    stage_documents(staging, plan, documents)
                    journal.add_staged()
                publish(folder, staging, paths, overwrite=overwrite or journal.overwrite)
            finally:
                sink.close()
                journal.close()
                if not journal.fingerprint and not (folder / UNFINISHED).exists():
                    discard(folder, staging)
    except OSError as error:
        raise OutputError(_failure(folder, error)) from error
    finally:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            files.remove_folder(folder)


def _open_journal(folder: Path, plan: Plan, *, overwrite: bool, restart: bool) -> Journal:
    """The journal of the unfinished output in ``folder`` if there is one to go on with, else a new one."""
    staging, now = folder / PARTIAL, fingerprint(plan)
    journal = Journal(staging / JOURNAL)
    goes_on = bool(journal.fingerprint) and not restart
    if goes_on:
        check_unchanged(folder, journal.fingerprint, now, _again(folder, journal))
    if not _may_replace(folder, journal, overwrite=overwrite, goes_on=goes_on):
        if not journal.fingerprint:
            discard(folder, staging)
        needed = _again(folder, journal) if restart and journal.fingerprint else "--overwrite"
        raise OutputError(f"{folder} is not empty: choose another folder, or say {needed}")
    if not goes_on:
        discard(folder, staging)
        journal = Journal(staging / JOURNAL)
        journal.begin(now, overwrite=overwrite or (folder / UNFINISHED).exists())
    return journal


def _check_paths(paths: list[str]) -> None:
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise PluginError(f"the writer planned a file called {path[:200]!r}, which is outside the output folder")


def _check_kept(folder: Path, specs: tuple[FileSpec, ...], journal: Journal, *, verify: bool) -> None:
    """Raises OutputError if a file with tensors of an earlier run is missing or not what it left."""
    for file in specs:
        kept = [t for t in file.tensors if t.name in journal.written]
        if not kept:
            continue
        path = staged(folder / PARTIAL, file.path)
        if journal.staged and not path.exists():
            path = folder / file.path
        size = path.stat().st_size if path.is_file() else None
        if size != file.nbytes:
            has = "is gone" if size is None else f"has {size:,} bytes; {file.nbytes:,} were written"
            raise OutputError(f"{path} of the unfinished output {has}: start over with {_again(folder, journal)}")
        if verify:
            _verify(path, file, journal.written)


def _verify(path: Path, file: FileSpec, hashes: Mapping[str, str]) -> None:
    offset = len(file.header)
    with path.open("rb") as opened:
        for tensor in file.tensors:
            if tensor.name in hashes:
                found = xxhash.xxh3_128()
                add_range(found, opened.fileno(), offset, tensor.nbytes)
                if found.hexdigest() != hashes[tensor.name]:
                    raise OutputError(
                        f"{path}: {tensor.name} is not what was written, so the disk may be failing: "
                        "start over with --restart"
                    )
            offset += tensor.nbytes


def _failure(folder: Path, error: OSError) -> str:
    sentence = f"{error.filename or folder} cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{sentence}: make room, then run the same command again"
    if error.errno == errno.EFBIG:  # such as 4 GB on FAT
        return f"{sentence}: write smaller shards (max_shard_size), or to a file system that holds larger files"
    return sentence


class FolderSink:
    """Places tensors of planned files with pwrite, from any thread and in any order."""

    def __init__(self, staging: Path, specs: tuple[FileSpec, ...], journal: Journal) -> None:
        self._staging, self._journal = staging, journal
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
            files.write_at(descriptor, piece, offset + start, path)
        fileio.write_back(descriptor, offset, data.nbytes)

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
        path = staged(self._staging, file.path)
        files.make_folders(path.parent)
        descriptor = files.create(path, file.nbytes)
        try:
            files.write_at(descriptor, bytes(file.header), 0, path)
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
                files.sync(descriptor, paths[path])
            for folder in {p.parent for p in paths.values()}:
                files.sync_folder(folder)
            self._journal.add(unsaved)
            self._lost = False
            for path in complete:
                with self._lock:
                    descriptor = self._open.pop(path)
                os.close(descriptor)
