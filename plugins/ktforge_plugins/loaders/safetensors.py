"""Loader ``safetensors``: one file or several, with or without an index."""

from __future__ import annotations

import json
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
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl
from ktforge.checkpoint.folder import METADATA
from ktforge.checkpoint.shards import merge_scans
from ktforge.contract.identity import Identity
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES
from ktforge.disk.reading import open_regular, parse_json
from ktforge.native import MappedFile

INDEX = "model.safetensors.index.json"
#: The library's own limit, in bytes.
HEADER_LIMIT = 100_000_000
Io = Literal["mmap", "pread"]


class SafetensorsLoader(FolderLoader):
    """Reads *.safetensors of a folder.

    ``io``: with ``mmap`` tensors are views of the mapped files, so kernels read the page cache; with ``pread`` they are
    read into memory first, which is far faster where every page fault goes over a network.
    """

    name: ClassVar[str] = "safetensors"
    io: Io = "mmap"

    _maps: dict[Path, MappedFile] = PrivateAttr(default_factory=dict)
    #: The files as the last scan found them.
    _sources: dict[Path, SourceFile] = PrivateAttr(default_factory=dict)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def reads(cls, folder: Path) -> bool:
        return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))

    def scan(self) -> Iterator[TensorSpec]:
        with self._lock:
            self._maps.clear()  # a file of the same name may be another one by now
        files, weight_map = self._files()
        scans = {file: _scan_file(file) for file in files}
        self._sources.clear()
        self._sources.update({file: source for file, (source, _) in scans.items()})
        return merge_scans({file: specs for file, (_, specs) in scans.items()}, weight_map, self.path, self.same)

    def sources(self) -> Sequence[SourceFile]:
        """The files as the last scan found them."""
        if not self._sources:
            self.scan()
        return tuple(self._sources.values())

    def read(self, spec: TensorSpec) -> np.ndarray:
        assert spec.file is not None
        if spec.nbytes == 0:
            return np.empty(spec.shape, spec.dtype)
        # The format does not align tensors; a kernel may count on the alignment of its element type.
        if self.io == "pread" or spec.offset % spec.dtype.itemsize:
            return self._pread(spec.file, spec)
        mapped = self._mapped(spec.file)
        if len(mapped) < spec.offset + spec.nbytes:
            raise cut_short(spec)
        raw = np.frombuffer(mapped, np.uint8, spec.nbytes, spec.offset)
        return raw.view(spec.dtype).reshape(spec.shape)

    def plan_key(self) -> PlanKey:
        return alike

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return spec.rows(start, stop)

    def release(self, spec: TensorSpec) -> None:
        """Takes the tensor's pages out of this process, whose memory would otherwise grow by all that it has read; they
        stay in the page cache, and a view that is still in use has them back when it is read."""
        if spec.file is not None and spec.nbytes and self.io == "mmap" and hasattr(mmap, "MADV_DONTNEED"):
            start, end = spec.offset // mmap.PAGESIZE * mmap.PAGESIZE, spec.offset + spec.nbytes
            with self._lock:
                mapped = self._maps.get(spec.file)
            if mapped is not None and end <= len(mapped):  # else it was never read, and that error counts
                mapped.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        files, weight_map = self.contents().weight_files("*.safetensors", INDEX)
        if not files:
            raise CheckpointError(f"{self.path} has no *.safetensors files")
        return files, weight_map

    def _mapped(self, file: Path) -> MappedFile:
        with self._lock:
            if file not in self._maps or self._maps[file].lost:
                source = self._sources.get(file)
                mapped = map_file(file, source.identity if source else None)
                if source is not None and _header_hash(mapped) != source.header_hash:
                    raise CheckpointError(f"{file} changed while it was read: its header is another")
                self._maps[file] = mapped
            return self._maps[file]

    def _pread(self, file: Path, spec: TensorSpec) -> np.ndarray:
        array = np.empty(spec.shape, spec.dtype)
        left, offset = array.reshape(-1).view(np.uint8).data, spec.offset
        source = self._sources.get(file)
        with _opened(file, source.identity if source else None) as opened:
            while left:
                count = os.preadv(opened.fileno(), [left], offset)
                if count == 0:
                    raise cut_short(spec)
                left, offset = left[count:], offset + count
        return array


def map_file(file: Path, identity: Identity | None) -> MappedFile:
    """Raises CheckpointError if it is not the file of that identity any more."""
    with _opened(file, identity) as opened:
        try:
            return MappedFile(opened.fileno())
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{file} is empty: it was cut short after it was opened") from error


@contextmanager
def _opened(file: Path, identity: Identity | None = None) -> Iterator[BinaryIO]:
    try:
        with open_regular(file) as opened:
            if identity is not None:
                identity.check(file, os.fstat(opened.fileno()))
            yield opened
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _header_hash(content: mmap.mmap) -> str:
    return xxhash.xxh3_128_hexdigest(content[8 : 8 + int.from_bytes(content[:8], "little")])


def cut_short(spec: TensorSpec) -> CheckpointError:
    return CheckpointError(f"{spec.file} ends before {spec.name} does: it was cut short after it was opened")


def _scan_file(file: Path) -> tuple[SourceFile, list[TensorSpec]]:
    with _opened(file) as opened:
        identity = Identity.of(os.fstat(opened.fileno()))
        try:
            # The library checks header, offsets and sizes. It does not tell the offsets, so the header is read again
            # (format: 8 bytes of length, header, data), from the file that was opened first.
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            if wrong := _wrong_metadata(file):
                raise CheckpointError(wrong) from error
            raise CheckpointError(
                f"{file} is not a whole safetensors file: {_reason(error)}; download it again"
            ) from error
        identity.check(file, os.stat(file), "looked at")
        length = int.from_bytes(os.pread(opened.fileno(), 8, 0), "little")
        header = os.pread(opened.fileno(), length, 8)
    try:
        entries = from_json(header)  # pydantic's parser takes two thirds of json's time
        # What the library does not look for is a name that stands there twice, spelled the same or with escapes.
        if b"\\" in header or header.count(b'"dtype"') != len(entries.keys() - {METADATA}):
            parse_json(header)
    except ValueError as error:
        raise CheckpointError(f"{file} has a broken header: {error}; download it again") from error
    entries.pop(METADATA, None)
    try:
        begin = 8 + length
        specs = [
            TensorSpec(name, DTYPES[t["dtype"]], tuple(t["shape"]), file, begin + t["data_offsets"][0])
            for name, t in entries.items()
        ]
    except KeyError:
        name, dtype = next((n, e["dtype"]) for n, e in entries.items() if e["dtype"] not in DTYPES)
        raise CheckpointError(
            f"{file}: {name[:200]} has the dtype {dtype}, which is no number format of weights: get "
            "a copy in BF16, FP16 or FP32, or save it so with transformers"
        ) from None
    except TypeError:  # the library reads some spellings of an entry that no writer uses, such as a list
        raise CheckpointError(f"{file} has a header that says in no known form what it holds: save it again") from None
    return SourceFile(file, identity.nbytes, xxhash.xxh3_128_hexdigest(header), identity), specs


def _wrong_metadata(file: Path) -> str | None:
    """What to say of a file whose ``__metadata__`` alone keeps the library from opening it; None for any other."""
    try:
        length, size = int.from_bytes(_first(file, 8), "little"), file.stat().st_size
        entries = parse_json(_first(file, 8 + length)[8:]) if length <= min(size, HEADER_LIMIT) else None
    except (ValueError, RecursionError, OSError):
        return None
    metadata = entries.get(METADATA) if isinstance(entries, dict) else None
    if isinstance(metadata, dict):
        odd = next(
            (f"{k[:100]!r} is {json.dumps(v)[:50]}" for k, v in metadata.items() if not isinstance(v, str)), None
        )
    else:
        odd = None if metadata is None else f"it is {json.dumps(metadata)[:50]}"
    return odd and (
        f"{file} has a __metadata__ that the format does not allow, so that no reader opens the file: it must map "
        f"strings to strings, and {odd}: save the tensors again with safetensors, or get a copy that was"
    )


def _first(file: Path, count: int) -> bytes:
    with open_regular(file) as opened:
        return opened.read(count)


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Error while deserializing header: ")[:200]


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [SafetensorsLoader]
