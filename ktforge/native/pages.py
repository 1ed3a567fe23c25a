"""Mapped pages that are gone: they read as zeros and are counted, instead of ending the process."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from ktforge._native import ffi, lib
from ktforge.native.arrays import require

#: What to say of a page that is gone, where nothing tells whose it was.
UNREADABLE = "a part of a source file cannot be read: look at the disk's health, or download the file again"
_catching = 0
_catching_lock = threading.Lock()


@contextmanager
def lost_pages_caught() -> Iterator[None]:
    """Within, a page of a :class:`MappedFile` or :class:`WatchedRanges` that is gone reads as zeros instead of ending
    the process, and so does all that is mapped behind it; :func:`lost_pages` counts them.

    In all threads: whoever reads them must ask for the count before using what was read.
    """
    global _catching
    with _catching_lock:
        _catching += 1
        if _catching == 1:
            require(lib.ktq_catch_lost_pages(1) == lib.KTQ_OK, "SIGBUS cannot be handled")
    try:
        yield
    finally:
        with _catching_lock:
            _catching -= 1
            if _catching == 0:
                lib.ktq_catch_lost_pages(0)


def lost_pages() -> int:
    """How many mapped pages could not be read since the process began."""
    return int(lib.ktq_lost_pages())


class WatchedRanges:
    """Ranges of addresses, each one mapping, whose lost pages are caught for as long as this lives: longer than anybody
    reads there, and no longer than they are mapped. Raises OSError if the process has too many."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[object] = []
        for low, high in ranges:
            start = ffi.cast("void *", low)
            if lib.ktq_lost_pages_watch(start, high - low) != lib.KTQ_OK:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # as mapping one file too many does
            self._starts.append(start)

    @property
    def lost(self) -> bool:
        """Whether some of it is zeros for ever, even if the file is whole again: then the file must be mapped anew."""
        return any(lib.ktq_lost_pages_of(start) for start in self._starts)

    def end(self) -> None:
        while self._starts:
            lib.ktq_lost_pages_unwatch(self._starts.pop())

    __del__ = end


class MappedFile(mmap.mmap):
    """An open file mapped for reading as a whole, and watched. Raises OSError, and ValueError for an empty file."""

    def __new__(cls, descriptor: int) -> MappedFile:
        return super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ)

    def __init__(self, descriptor: int) -> None:
        low = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        self._watched = WatchedRanges([(low, low + len(self))])  # attributes go before the mapping does

    @property
    def lost(self) -> bool:
        """As of :class:`WatchedRanges`."""
        return self._watched.lost

    def close(self) -> None:
        super().close()  # raises BufferError, and nothing is unmapped, while there are views
        self._watched.end()
