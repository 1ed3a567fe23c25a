"""What loaders of a checkpoint folder have in common: where it is, its config.json and what else lies in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import Field

from ktforge.checkpoint.folder import CheckpointFolder
from ktforge.contract.stages import Loader
from ktforge.contract.tensors import TensorSpec

#: Bytes of two tensors that are compared at a time.
COMPARED = 1 << 24


class FolderLoader(Loader):
    """A loader of a folder; a subclass says which files hold the weights and how they are read."""

    path: Path = Field(description="The checkpoint's folder.")
    follow_links: bool | None = Field(
        default=None, description="Follow symbolic links of any file, not of weights alone, wherever they lead."
    )

    def folder(self) -> Path:
        return self.path

    def config(self) -> Mapping[str, Any]:
        return self.contents().config()

    def side_files(self) -> Sequence[Path]:
        return self.contents().side_files()

    def open_side_file(self, path: Path) -> BinaryIO:
        return self.contents().open(path)

    def same(self, one: TensorSpec, other: TensorSpec) -> bool:
        """Whether two tensors of this folder have the same bytes; they are read only where all else is equal."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        equal = same_bytes(self.read(one), self.read(other))
        self.release(one)
        self.release(other)
        return equal

    def contents(self) -> CheckpointFolder:
        """The folder as ktforge reads it."""
        return CheckpointFolder(self.path, bool(self.follow_links))


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of one size have the same bytes, which are compared no further than they are equal."""
    first, second = (array.reshape(-1).view(np.uint8) for array in (one, other))
    pieces = range(0, first.size, COMPARED)
    return all(np.array_equal(first[i : i + COMPARED], second[i : i + COMPARED]) for i in pieces)
