"""Mapped pages that are gone: they read as zeros and are counted, instead of ending the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ktforge._native import lib
from ktforge.native.arrays import require

#: What to say of a page that is gone, where nothing tells whose it was.
UNREADABLE = "a part of a source file cannot be read: look at the disk's health, or download the file again"
_catching = 0
_catching_lock = threading.Lock()


@contextmanager
def lost_pages_caught() -> Iterator[None]:
    """Within, a mapped page that is gone reads as zeros instead of ending the process; :func:`lost_pages` counts them.

    In all threads, and for all mapped files of the process: whoever reads them must ask for the count before using what
    was read.
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
