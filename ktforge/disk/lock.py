"""One run at a time in an output folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ktforge.disk import writing
from ktforge.disk.marks import LOCK
from ktforge.errors import OutputError

#: Linux names the running kernel here; containers of one machine have host names of their own, but share this.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lock:
    """The lock of a run, and the folders that it is about. They are held open, so that no others pass for them, and the
    run works in them by :attr:`folders`, wherever they are by then."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path
        self.folders = writing.Folders()
        try:
            for folder in (path.parent, path.parent.parent):
                self.folders.hold(folder)
        except BaseException:
            self.close()
            raise

    def lost(self) -> Path | None:
        """What is not at its path any more; None if all is."""
        held = {self._path: self._descriptor, **self.folders.held}
        return next((path for path, descriptor in held.items() if not _is_at(descriptor, path)), None)

    def check(self) -> None:
        """Raises OutputError if the output folder, the staging folder or the lock in it was moved, removed or replaced:
        another run may have begun there."""
        if lost := self.lost():
            raise OutputError(
                f"{lost} was moved, removed or replaced while the run worked, so nothing more is put there: "
                "if it was moved, move it back, then run the same command again"
            )

    def close(self) -> None:
        self.folders.close()
        os.close(self._descriptor)


@contextmanager
def locked(staging: Path) -> Iterator[Lock]:
    """Holds the lock of a staging folder, which is made if it is missing and removed behind the run if it is empty.

    Raises OutputError if another run holds it, naming its process and host. The kernel releases the lock of a process
    that dies. The file says whose it was, which matters where a network file system does not carry locks from one
    host to the other: what a run that died on another host left is refused.
    """
    path = staging / LOCK
    descriptor = _acquire(path)
    lock = Lock(descriptor, path)
    try:
        lock.check()
        writing.write_at(descriptor, json.dumps(_here()).encode(), 0, path)
        yield lock
    finally:
        is_here = lock.lost() is None
        with suppress(OSError):  # a lock that stays is recognised as stale
            if is_here:
                writing.remove(path, lock.folders)
        with suppress(OSError):  # what is not empty is an unfinished output
            if is_here:
                writing.remove_folder(staging, lock.folders)
        lock.close()


def _acquire(path: Path) -> int:
    while True:
        writing.make_folders(path.parent)
        try:
            descriptor = writing.open_file(path)
        except FileNotFoundError:  # the run before has removed the folder just now
            continue
        try:
            if taken := _taken(descriptor, path):
                raise OutputError(taken)
            if _is_at(descriptor, path):
                writing.truncate(descriptor, 0, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner has removed it meanwhile: a lock on it keeps nobody out


def held(staging: Path) -> str | None:
    """Why a run could not have the lock of a staging folder now; None if it could."""
    path = staging / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return f"{path} cannot be a lock: a pipe or a device is in its place; remove it"
        return _taken(descriptor, path)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, path: Path) -> str | None:
    alive, owner = _held_by_another(descriptor), _owner(descriptor)
    if alive or (owner and not _is_here(owner)):  # elsewhere, whether its process lives is not known
        return _refusal(path, owner, alive=alive)
    return None


def _held_by_another(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # a file system without locks, such as Lustre as it is often mounted: the pid must do
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        owner = _owner(descriptor)
        return bool(owner) and _is_here(owner) and _is_running(owner["pid"])
    return False


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}
    except (ValueError, RecursionError):  # a new lock, or one whose owner died before it could sign
        return {}


def _here() -> dict[str, Any]:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return {"pid": os.getpid(), "host": platform.node(), "boot": boot}


def _is_here(owner: dict[str, Any]) -> bool:
    here = _here()
    return owner.get("host") == here["host"] or bool(here["boot"] and owner.get("boot") == here["boot"])


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _refusal(path: Path, owner: dict[str, Any], *, alive: bool) -> str:
    whose = f"process {owner['pid']} on {owner.get('host')}" if owner else "another process"
    if alive:
        return f"{path.parent.parent} is being written by {whose}: wait for it, or choose another folder"
    return (
        f"{path.parent.parent} was begun by {whose}, and whether that still runs cannot be seen from here: "
        f"if it does not, remove {path}"
    )
