"""System calls that not every Python has: room for a file at once, writing back while work goes on, taking mapped
pages out of the process, and what quotas leave.

The first three change how fast and how soon, never what is in the file, so where the C library or the file system lacks
them nothing is done. quotactl_fd(2), of Linux 5.14, needs no device and no rights; quotas of projects count in the free
space of the file system already, and those of NFS, Lustre and others are not told.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

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


def forget(descriptor: int) -> None:
    """Has the system let go of what it keeps of a file in memory, so that it is read from the disk again: all that is
    synced and that nobody has mapped. Where there is no posix_fadvise, such as on macOS, nothing is done."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


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

_QUOTACTL_FD = 443  # on every architecture but Alpha
_GET_QUOTA = 0x800007  # <linux/quota.h>
_USER, _GROUP = 0, 1
_BLOCK = 1024  # bytes that limits are counted in


class _Limits(ctypes.Structure):
    """struct if_dqblk of <linux/quota.h>; a limit of 0 is none."""

    _fields_ = [
        ("hard_blocks", ctypes.c_uint64),
        ("soft_blocks", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("hard_files", ctypes.c_uint64),
        ("soft_files", ctypes.c_uint64),
        ("files", ctypes.c_uint64),
        ("block_time", ctypes.c_uint64),
        ("file_time", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    ]


def quota_left(folder: Path) -> int | None:
    """Bytes that the quotas of this process's user and group leave on the file system of ``folder``; None if unknown.

    Soft limits do not count, since they may be exceeded for days.
    """
    found = os.stat(folder)
    gid = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
    limits = [limit for limit in (_limits(folder, _USER, os.geteuid()), _limits(folder, _GROUP, gid)) if limit]
    return min((max(0, q.hard_blocks * _BLOCK - q.bytes) for q in limits if q.hard_blocks), default=None)


def _limits(folder: Path, whose: int, number: int) -> _Limits | None:
    if sys.platform != "linux":
        return None
    limits = _Limits()
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # such as a folder that may be written to, not listed
        return None
    try:
        failed = ctypes.CDLL(None).syscall(
            ctypes.c_long(_QUOTACTL_FD), ctypes.c_int(descriptor), ctypes.c_int(_GET_QUOTA << 8 | whose),
            ctypes.c_int(number), ctypes.byref(limits),
        )  # fmt: skip
    finally:
        os.close(descriptor)
    return None if failed else limits
