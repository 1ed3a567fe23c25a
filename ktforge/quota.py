"""What quotas leave in a folder, where Linux tells: quotactl_fd(2), of Linux 5.14, needs no device and no rights.

Quotas of projects count in the free space of the file system already; those of NFS, Lustre and others are not told.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from pathlib import Path

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
    group = found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()
    limits = [limit for limit in (_limits(folder, _USER, os.geteuid()), _limits(folder, _GROUP, group)) if limit]
    return min((max(0, q.hard_blocks * _BLOCK - q.bytes) for q in limits if q.hard_blocks), default=None)


def _limits(folder: Path, kind: int, number: int) -> _Limits | None:
    if sys.platform != "linux":
        return None
    limits = _Limits()
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # such as a folder that may be written to, not listed
        return None
    try:
        failed = ctypes.CDLL(None).syscall(
            ctypes.c_long(_QUOTACTL_FD), ctypes.c_int(descriptor), ctypes.c_int(_GET_QUOTA << 8 | kind),
            ctypes.c_int(number), ctypes.byref(limits),
        )  # fmt: skip
    finally:
        os.close(descriptor)
    return None if failed else limits
