"""An output folder that is either finished or says that it is not. Folder writers build on this.

Everything grows below ``.ktforge-partial`` under names that no weight loader picks up, and is renamed into place when
all of it is written and synced: weight files first, then what describes them, the manifest last.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ktforge.checkpoint import CONFIG, MANIFEST, read_json
from ktforge.errors import OutputError, PluginError
from ktforge.fileio import allocate, write_back
from ktforge.manifest import manifest_json
from ktforge.tensors import FileSpec, TensorSpec

if TYPE_CHECKING:
    from ktforge.plan import Plan

PARTIAL = ".ktforge-partial"
#: What an engine would take for weights of this folder; --overwrite removes it before the new files take its place.
STALE = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "_layer_*/_numa_*/*.kt")


def check_output(folder: Path, source: Path | None, overwrite: bool) -> list[str]:
    """Why this folder cannot take an output, one sentence each; empty if it can."""
    if folder.exists() and not folder.is_dir():
        return [f"{folder} is a file: give a folder for the output"]
    problems = []
    if source is not None:
        here, there = folder.resolve(), source.resolve()
        if here == there or here in there.parents or there in here.parents:
            problems.append(f"the output {folder} and the checkpoint {source} overlap: choose another folder")
    if not overwrite and folder.is_dir() and any(p.name != PARTIAL for p in folder.iterdir()):
        problems.append(f"{folder} is not empty: choose another folder, or say --overwrite")
    return problems


@contextmanager
def open_folder(folder: Path, plan: Plan, documents: Mapping[str, bytes], *, overwrite: bool) -> Iterator[FolderSink]:
    """A sink for the files of ``plan``; on a clean exit the folder is complete, after an exception it is as before.

    ``documents`` are further files by name, such as an index. Raises OutputError if the folder cannot be written,
    PluginError if a planned tensor was never written.
    """
    problems = check_output(folder, plan.pipeline.loader.folder(), overwrite)
    if problems:
        raise OutputError(*problems)
    existed = folder.exists()
    staging = folder / PARTIAL
    try:
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir(parents=True)
        sink = FolderSink(staging, plan.files)
        try:
            yield sink
            sink.finish()
            _stage_documents(staging, plan, documents)
            _publish(folder, staging, plan, documents)
        finally:
            sink.close()
            shutil.rmtree(staging, ignore_errors=True)
            if not existed and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise OutputError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error


class FolderSink:
    """Places tensors of planned files with pwrite, from any thread and in any order."""

    def __init__(self, staging: Path, files: tuple[FileSpec, ...]) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._left = {f.path: len(f.tensors) for f in files}
        self._place: dict[str, tuple[FileSpec, int]] = {}
        for file in files:
            offset = len(file.header)
            for tensor in file.tensors:
                self._place[tensor.name] = file, offset
                offset += tensor.nbytes

    def write(self, tensor: TensorSpec, data: np.ndarray) -> None:
        """Raises PluginError for a tensor that is not planned, already written, or of another size."""
        with self._lock:
            if tensor.name not in self._place:
                raise PluginError(f"{tensor.name} was written twice or never planned")
            file, offset = self._place.pop(tensor.name)
        if data.nbytes != tensor.nbytes:
            raise PluginError(f"{tensor.name} has {data.nbytes:,} bytes; {tensor.nbytes:,} were planned")
        if data.nbytes:
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            _pwrite_all(self._descriptor(file), flat.data, offset)
            write_back(self._descriptor(file), offset, data.nbytes)
        self._written(file)

    def finish(self) -> None:
        """Closes and syncs what is still open. Raises PluginError if a tensor is missing."""
        if self._place:
            missing = next(iter(self._place))
            raise PluginError(f"{missing} was planned but never written (one of {len(self._place):,} tensors)")
        for path, left in self._left.items():
            assert left == 0, path
        self.close()

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def _descriptor(self, file: FileSpec) -> int:
        with self._lock:
            if file.path not in self._open:
                path = staged(self._staging, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                self._open[file.path] = descriptor
                allocate(descriptor, file.nbytes)
                _pwrite_all(descriptor, memoryview(file.header), 0)
            return self._open[file.path]

    def _written(self, file: FileSpec) -> None:
        """Syncs and closes a file behind its last tensor, so that no more stay open than are being filled."""
        with self._lock:
            self._left[file.path] -= 1
            if self._left[file.path]:
                return
        self._descriptor(file)  # a file of empty tensors only was not opened yet
        with self._lock:
            descriptor = self._open.pop(file.path)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def staged(staging: Path, path: str) -> Path:
    """Where a file grows: its suffix is one that weight loaders, which walk folders for theirs, do not look for."""
    return staging / (path + ".partial")


def _pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _stage_documents(staging: Path, plan: Plan, documents: Mapping[str, bytes]) -> None:
    source = plan.pipeline.loader.folder()
    for relative in plan.side_files:
        assert source is not None
        target = staged(staging, str(relative))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    texts = {**documents, MANIFEST: manifest_json(plan)}
    if plan.config_json is not None:
        texts[CONFIG] = plan.config_json
    for name, content in texts.items():
        with staged(staging, name).open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())


def _publish(folder: Path, staging: Path, plan: Plan, documents: Mapping[str, bytes]) -> None:
    """Renames all into place. Until the manifest is there, the folder is not a finished output of ktforge."""
    weights = [f.path for f in plan.files]
    rest = [str(p) for p in plan.side_files] + ([CONFIG] if plan.config_json is not None else []) + list(documents)
    _remove_previous(folder)
    for path in [*weights, *rest, MANIFEST]:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged(staging, path), target)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_previous(folder: Path) -> None:
    """Takes away an earlier output's files, its manifest first; other files of the user's stay."""
    manifest = folder / MANIFEST
    if manifest.exists():
        listed = read_json(manifest).get("side_files", [])
        manifest.unlink()
        for name in listed:
            if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts:
                (folder / name).unlink(missing_ok=True)
    for pattern in STALE:
        for path in folder.glob(pattern):
            path.unlink()
    for layer in folder.glob("_layer_*"):
        for numa in layer.glob("_numa_*"):
            if not any(numa.iterdir()):
                numa.rmdir()
        if not any(layer.iterdir()):
            layer.rmdir()
