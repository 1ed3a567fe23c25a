"""The loader ``example``: a folder of .npz files, as numpy.savez writes them, with config.json beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from zipfile import BadZipFile, ZipFile

import numpy as np
import xxhash
from numpy.lib import format as npy

from ktforge import CheckpointError, FolderLoader, Loader, SourceFile, TensorSpec, hookimpl

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class ExampleLoader(FolderLoader):
    """Reads *.npz of a folder: every array is the tensor of its name."""

    name: ClassVar[str] = "example"

    @classmethod
    def reads(cls, folder: Path) -> bool:
        """With this, `auto` leaves such folders to this loader, and so do convert and inspect."""
        return any(folder.glob("*.npz"))

    def scan(self) -> Iterator[TensorSpec]:
        for file in self._files():
            with _opened(file) as archive:
                for member in archive.namelist():
                    with archive.open(member) as stream:
                        shape, _, dtype = HEADERS[npy.read_magic(stream)](stream)
                    if dtype.hasobject or dtype.kind == "V":
                        raise CheckpointError(f"{file}: {member} holds {dtype}, which is no number: save it as float32")
                    yield TensorSpec(member.removesuffix(".npy"), dtype, shape, file)

    def read(self, spec: TensorSpec) -> np.ndarray:
        assert spec.file is not None
        with _opened(spec.file) as archive, archive.open(f"{spec.name}.npy") as stream:
            return npy.read_array(stream)

    def scratch_bytes(self, spec: TensorSpec) -> int:
        return 3 * npy.BUFFER_SIZE  # numpy reads an archive's member in pieces of this size

    def sources(self) -> Sequence[SourceFile]:
        """Without these, a run that was cut off could not tell whether it goes on with the same checkpoint."""
        found = []
        for file in self._files():
            with _opened(file) as archive:
                members = [(m.filename, m.file_size, m.CRC) for m in archive.infolist()]
            found.append(SourceFile(file, file.stat().st_size, xxhash.xxh3_128_hexdigest(repr(members).encode())))
        return found

    def _files(self) -> list[Path]:
        self.contents().check()
        files = sorted(self.path.glob("*.npz"))
        if not files:
            raise CheckpointError(f"{self.path} has no *.npz files")
        return files


@contextmanager
def _opened(file: Path) -> Iterator[ZipFile]:
    """The archive; what is wrong with it is said with its name."""
    try:
        with ZipFile(file) as archive:
            yield archive
    except (BadZipFile, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is no whole .npz file: {error}; get it again") from error


@hookimpl
def ktforge_loaders() -> Iterable[type[Loader]]:
    return [ExampleLoader]
