"""The hash of a tensor that is written in pieces, and of a file that is made of tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import xxhash

from ktforge.contract.tensors import TensorSpec
from ktforge.disk import writing
from ktforge.errors import PluginError


def joined_hash(digests: Iterable[bytes]) -> str:
    """The hash of a file, in hex, by those of its parts that hold any bytes: its header and its tensors, in the order
    of the file.

    It is the xxh3-128 of their digests, 16 bytes each, and of a single part it is that part's own: then the file's,
    too. So it is known when the tensors are written, in whatever order, and can be looked at by all cores.
    """
    parts = list(digests)
    return parts[0].hex() if len(parts) == 1 else xxhash.xxh3_128_hexdigest(b"".join(parts))


def add_range(found: xxhash.xxh3_128, descriptor: int, offset: int, nbytes: int) -> None:
    """Adds what a range of a file holds."""
    end = offset + nbytes
    while offset < end and (data := os.pread(descriptor, min(end - offset, writing.CHUNK), offset)):
        found.update(data)
        offset += len(data)


class Growing:
    """A tensor that is written in pieces: hashed in the order of its bytes, in whatever order they come."""

    def __init__(self, tensor: TensorSpec) -> None:
        self.found = xxhash.xxh3_128()
        self._tensor = tensor
        self._lock = threading.Lock()  # of all that follows
        self._hashed = 0
        self._pieces: dict[int, int] = {}

    def turn(self, begin: int) -> xxhash.xxh3_128 | None:
        """The hash, which is to take a piece as it is written; None for a piece that others have to come before.

        Raises PluginError for one that has come.
        """
        with self._lock:
            if begin < self._hashed or begin in self._pieces:
                raise PluginError(f"rows of {self._tensor.name} were written twice")
            return self.found if begin == self._hashed else None

    def add(self, begin: int, nbytes: int, hashed: bool, descriptor: int, offset: int) -> bool:
        """Counts a piece that is in the file, where the tensor begins at ``offset``; whether it was the last.

        Pieces that came before their turn are read again, from the page cache.
        """
        with self._lock:
            if hashed:
                self._hashed += nbytes
            else:
                self._pieces[begin] = nbytes
            while nbytes := self._pieces.pop(self._hashed, 0):
                add_range(self.found, descriptor, offset + self._hashed, nbytes)
                self._hashed += nbytes
            return self._hashed == self._tensor.nbytes
