"""Loader ``safetensors``: one file or several, with or without an index."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

import numpy as np
import xxhash
from pydantic import PrivateAttr
from safetensors import SafetensorError, safe_open

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl
from ktforge.checkpoint import merge_scans, parse_json
from ktforge.tensors import DTYPES

INDEX = "model.safetensors.index.json"


class SafetensorsLoader(FolderLoader):
    """Reads *.safetensors of a folder.

    ``io``: with ``mmap`` tensors are views of the mapped files, so kernels read the page cache; with ``pread`` they are
    read into memory first, which is far faster where every page fault goes over a network.
    """

    name: ClassVar[str] = "safetensors"
    io: Literal["mmap", "pread"] = "mmap"

    _maps: dict[Path, mmap.mmap] = PrivateAttr(default_factory=dict)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def scan(self) -> Iterator[TensorSpec]:
        with self._lock:
            self._maps.clear()  # a file of the same name may be another one by now
        files, weight_map = self._files()
        return merge_scans({f: list(_scan_file(f)) for f in files}, weight_map, self.path)

    def sources(self) -> Sequence[SourceFile]:
        return [
            SourceFile(f, f.stat().st_size, xxhash.xxh3_128_hexdigest(_header_bytes(f)[1])) for f in self._files()[0]
        ]

    def read(self, spec: TensorSpec) -> np.ndarray:
        assert spec.file is not None
        if spec.nbytes == 0:
            return np.empty(spec.shape, spec.dtype)
        if self.io == "pread":
            return _pread(spec.file, spec)
        mapped = self._mapped(spec.file)
        if len(mapped) < spec.offset + spec.nbytes:
            raise _cut_short(spec)
        raw = np.frombuffer(mapped, np.uint8, spec.nbytes, spec.offset)
        array = raw.view(spec.dtype).reshape(spec.shape)
        # The format does not align tensors; a kernel may count on the alignment of its element type.
        return array if spec.offset % spec.dtype.itemsize == 0 else array.copy()

    def release(self, spec: TensorSpec) -> None:
        """Takes the tensor's pages out of this process, whose memory would otherwise grow by all that it has read; they
        stay in the page cache, and a view that is still in use has them back when it is read."""
        if spec.file is not None and spec.nbytes and self.io == "mmap" and hasattr(mmap, "MADV_DONTNEED"):
            start = spec.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapped(spec.file).madvise(mmap.MADV_DONTNEED, start, spec.offset + spec.nbytes - start)

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        files, weight_map = self.contents().weight_files("*.safetensors", INDEX)
        if not files:
            raise CheckpointError(f"{self.path} has no *.safetensors files")
        return files, weight_map

    def _mapped(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                with _opened(file) as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[file]


def _pread(file: Path, spec: TensorSpec) -> np.ndarray:
    array = np.empty(spec.shape, spec.dtype)
    left, offset = array.reshape(-1).view(np.uint8).data, spec.offset
    with _opened(file) as opened:
        while left:
            count = os.preadv(opened.fileno(), [left], offset)
            if count == 0:
                raise _cut_short(spec)
            left, offset = left[count:], offset + count
    return array


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb", buffering=0) as opened:
            yield opened
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _cut_short(spec: TensorSpec) -> CheckpointError:
    return CheckpointError(f"{spec.file} ends before {spec.name} does: it was cut short after it was opened")


def _header_bytes(file: Path) -> tuple[int, bytes]:
    """Where the data begins, and the JSON header (format: 8 bytes of length, header, data)."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, opened.read(length)


def _scan_file(file: Path) -> Iterable[TensorSpec]:
    try:
        # The library checks header, offsets and sizes. It does not tell the offsets, so the header is read again.
        with safe_open(file, framework="numpy"):
            pass
        start, header = _header_bytes(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {_reason(error)}; download it again") from error
    try:
        entries = parse_json(header)
    except ValueError as error:
        raise CheckpointError(f"{file} has a broken header: {error}; download it again") from error
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{file}: {name[:200]} has the dtype {entry['dtype']}, which ktforge does not read")
        yield TensorSpec(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), file, start + entry["data_offsets"][0])


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Error while deserializing header: ")[:200]


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [SafetensorsLoader]
