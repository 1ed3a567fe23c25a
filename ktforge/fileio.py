"""System calls that Python's os does not have: room for a file at once, writing back while work goes on, and taking
mapped pages out of the process.

All change how fast and how soon, never what is in the file, so where the C library or the file system lacks them
nothing is done.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_ABSENT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE}


def reserve(descriptor: int, nbytes: int) -> None:
    """Has the file system find room for a file of so many bytes. Raises OSError, ENOSPC if there is none.

    Writing into room that is there took half the time of growing the file (ext4). Not ``posix_fallocate``: where the
    file system cannot, that writes a byte to every block instead.
    """
    if nbytes:
        _call(_fallocate, descriptor, 0, 0, nbytes)


def write_back(descriptor: int, offset: int, nbytes: int) -> None:
    """Starts to bring a range to the disk, without waiting, so that the last fsync has little left to do."""
    _call(_sync_file_range, descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def drop_pages(address: int, nbytes: int) -> None:
    """Takes the pages of a range out of this process. It must be mapped from a file and never written to: then they
    come back from there when they are read again."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED"):
        _call(_madvise, start, address + nbytes - start, mmap.MADV_DONTNEED)


def _call(function: Callable[..., int] | None, *arguments: int) -> None:
    if function is None or function(*arguments) == 0:
        return
    number = ctypes.get_errno()
    if number not in _ABSENT:
        raise OSError(number, os.strerror(number))


def _find(name: str, *types: type) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function


_fallocate = _find("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_madvise = _find("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_sync_file_range = _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
