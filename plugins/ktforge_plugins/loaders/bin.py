"""Loader ``bin``: pytorch_model*.bin with or without an index. The only built-in that needs torch."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xxhash
from pydantic import PrivateAttr

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl
from ktforge.checkpoint.shards import merge_scans
from ktforge.contract.identity import Identity
from ktforge.contract.tensors import DTYPES, dtype_name
from ktforge.disk import system
from ktforge.disk.reading import open_regular
from ktforge.native import WatchedRanges
from ktforge_plugins.loaders.pickles import check_pickle

if TYPE_CHECKING:
    import torch

PATTERN = "pytorch_model*.bin"
INDEX = "pytorch_model.bin.index.json"
#: Bytes; the pickle holds names and places only, about 200 bytes a tensor.
PICKLE_LIMIT = 100 * 1000 * 1000


@dataclass(frozen=True)
class _File:
    """A file as torch has loaded it. What is watched comes first, so that it goes before the mapping does."""

    watched: WatchedRanges
    #: Addresses between which pages are those of the file; a tensor elsewhere is a copy that torch made.
    mapped: list[tuple[int, int]]
    tensors: dict[str, torch.Tensor]

    def part(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor, or those of its rows that a spec from :meth:`BinLoader.rows` means."""
        tensor = self.tensors[spec.name].detach()
        if tuple(tensor.shape) == spec.shape:
            return tensor
        start = spec.offset // tensor[:1].nbytes
        return tensor[start : start + spec.shape[0]]


class _View:
    """What numpy keeps beside an array of a file's bytes, so that they are watched for as long as it lives."""

    def __init__(self, file: _File, array: np.ndarray) -> None:
        self._file, self._array = file, array
        self.__array_interface__ = array.__array_interface__


class BinLoader(FolderLoader):
    """Reads pytorch_model*.bin: tensors only (``weights_only=True``), mapped, never arbitrary pickle."""

    name: ClassVar[str] = "bin"

    #: The files as they were first read since the last scan.
    _sources: dict[Path, SourceFile] = PrivateAttr(default_factory=dict)
    _files_read: dict[Path, _File] = PrivateAttr(default_factory=dict)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @classmethod
    def reads(cls, folder: Path) -> bool:
        return (folder / INDEX).exists() or any(folder.glob(PATTERN))

    def scan(self) -> Iterator[TensorSpec]:
        with self._lock:
            self._files_read.clear()  # a file of the same name may be another one by now
            self._sources.clear()
        files, weight_map = self._files()
        return merge_scans({f: list(self._scan_file(f)) for f in files}, weight_map, self.path, self.same)

    def sources(self) -> Sequence[SourceFile]:
        if not self._sources:
            self.scan()
        return tuple(self._sources.values())

    def read(self, spec: TensorSpec) -> np.ndarray:
        import torch

        assert spec.file is not None
        file = self._file(spec.file)
        # numpy has no bf16 or fp8 of its own, so the bytes travel and ml_dtypes names them.
        array = file.part(spec).contiguous().view(-1).view(torch.uint8).numpy()
        return np.asarray(_View(file, array)).view(spec.dtype).reshape(spec.shape)

    def release(self, spec: TensorSpec) -> None:
        """Takes the tensor's pages out of this process; a view that is still in use has them back when it is read."""
        assert spec.file is not None
        with self._lock:
            file = self._files_read.get(spec.file)
        if file is None:  # it was never read, and that error counts
            return
        tensor = file.part(spec)
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
            if any(low <= start and end <= high for low, high in file.mapped):
                system.drop_pages(start, end - start)

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return spec.rows(start, stop)

    def scratch_bytes(self, spec: TensorSpec) -> int:
        """The mapped pages of a tensor that is not contiguous, beside its copy."""
        assert spec.file is not None
        return 0 if self._file(spec.file).part(spec).is_contiguous() else spec.nbytes

    def _files(self) -> tuple[list[Path], dict[str, str] | None]:
        files, weight_map = self.contents().weight_files(PATTERN, INDEX)
        if not files:
            raise CheckpointError(f"{self.path} has no {PATTERN} files")
        return files, weight_map

    def _scan_file(self, file: Path) -> Iterator[TensorSpec]:
        tensors = self._file(file).tensors  # which says so where torch is missing
        dtypes = _numpy_dtypes()
        for name, tensor in tensors.items():
            if tensor.dtype not in dtypes:
                raise CheckpointError(
                    f"{file}: {name} has the dtype {tensor.dtype}, which is no number format of weights: get "
                    "a copy in BF16, FP16 or FP32, or save it so with transformers"
                )
            yield TensorSpec(name, dtypes[tensor.dtype], tuple(tensor.shape), file)

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        """Torch opens a file by its name, so what has that name is looked at before and behind."""
        try:
            before = self._sources.get(path)
            with open_regular(path) as opened:
                identity = Identity.of(os.fstat(opened.fileno()))
                if before is not None and before.identity is not None:
                    before.identity.check(path, os.fstat(opened.fileno()))
                tensors = _load(path)
                found = SourceFile(path, identity.nbytes, xxhash.xxh3_128_hexdigest(_pickle_bytes(path)), identity)
                identity.check(path, os.stat(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if before is not None and before.header_hash != found.header_hash:
            raise CheckpointError(f"{path} changed while it was read: its tensors are others")
        self._sources[path] = found
        return tensors

    def _file(self, path: Path) -> _File:
        with self._lock:
            if path not in self._files_read or self._files_read[path].watched.lost:
                tensors = self._load(path)
                mapped = _mapped(path, tensors)
                self._files_read[path] = _File(WatchedRanges(mapped), mapped, tensors)
            return self._files_read[path]


def _numpy_dtypes() -> dict[torch.dtype, np.dtype]:
    """torch's dtype → numpy's, for those that safetensors knows too."""
    import torch

    by_name = {dtype.name: dtype for dtype in DTYPES.values()}
    found = {getattr(torch, name): dtype for name, dtype in by_name.items() if hasattr(torch, name)}
    assert len(found) >= len(DTYPES) - 1, [dtype_name(d) for d in DTYPES.values() if d not in found.values()]
    return found


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"reading {file} needs torch: pip install 'ktforge[torch]'") from error
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"{file} is not a whole torch.save archive (cut short, or written before PyTorch 1.6): "
            "download it again, or load and save it with a current PyTorch"
        )
    _check_archive(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds pickled objects other than tensors, which could run code, so it is not loaded: "
            "convert it to safetensors where you trust it"
        ) from error
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError … for broken archives
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise CheckpointError(f"{file} cannot be read by torch: {reason}: download it again") from error
    if not isinstance(state, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) and v.layout is torch.strided for k, v in state.items()
    ):
        raise CheckpointError(f"{file} is not a plain state dict of dense tensors: save model.state_dict() instead")
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or size > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{file}: {name[:200]} has {size:,} bytes, its storage {tensor.untyped_storage().nbytes():,}: "
                "save a contiguous copy instead"
            )
    return dict(state)


def _mapped(file: Path, tensors: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Where this process has mapped a file for these tensors, from /proc/self/maps; nowhere if its bytes are in the
    other order, for then torch has changed the mapped pages."""
    with zipfile.ZipFile(file) as archive:
        order = next((archive.read(n) for n in archive.namelist() if n.endswith("/byteorder")), b"little")
    maps = Path("/proc/self/maps")
    if order.decode(errors="replace") != sys.byteorder or not maps.exists():
        return []
    found, path = [], os.fsencode(file.resolve()).replace(b"\n", b"\\012")
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    for line in maps.read_bytes().splitlines():
        ends, *_, name = line.split(None, 5)
        low, high = (int(end, 16) for end in ends.split(b"-"))
        if name == path and any(low <= address < high for address in addresses):
            found.append((low, high))
    return found


def _check_archive(file: Path) -> None:
    """Refuses what torch would unpack into memory or make there: torch.save compresses nothing, so every entry is as
    long inside, and no storage is larger than its entry."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{file} is not a whole torch.save archive: {error}; download it again") from error
    packed = next((e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(
            f"{file} is compressed ({packed[:200]}), which torch.save never does: load and save it again"
        )
    pickles = [e for e in entries if e.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > PICKLE_LIMIT:
        raise CheckpointError(f"{file} has no data.pkl as torch.save writes it: download it again")
    storages = pickles[0].filename.removesuffix("data.pkl") + "data/"
    sizes = {e.filename.removeprefix(storages): e.file_size for e in entries if e.filename.startswith(storages)}
    check_pickle(file, _pickle_bytes(file), sizes)


def _pickle_bytes(file: Path) -> bytes:
    """The archive's pickle: names, dtypes, shapes and places of all tensors, so it serves as the header."""
    with zipfile.ZipFile(file) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [BinLoader]
