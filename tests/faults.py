"""A disk that fails: stands in for ``os`` in ktforge/disk/writing.py, where every change to a disk is made.

It counts the calls that change something. ``action`` decides what becomes of each: it gets the call and may let it
happen, raise, or end the process. A sync is counted but not carried out: what it is good for, :class:`Power` knows.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = ("open", "ftruncate", "pwrite", "fsync", "replace", "unlink", "mkdir", "rmdir")


@dataclass
class Call:
    """The ``number``-th change: what it is, and the file or folder that it is made to (of a rename, the new name)."""

    number: int
    name: str
    path: Path
    really: Callable[[], Any]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.number} {self.name} {self.path}"


class Disk:
    def __init__(self, action: Callable[[Call], Any] = lambda call: call.really()) -> None:
        self.calls: list[str] = []
        self._action = action
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name not in CHANGES:
            return getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:  # one change at a time, so that runs with one worker count alike
                where = [options.get(key) for key in ("src_dir_fd", "dst_dir_fd")] if name == "replace" else ()
                where = where or [options.get("dir_fd")]
                paths = [_path(what, folder) for what, folder in zip(arguments, where, strict=False)]

                def really() -> Any:
                    return getattr(os, name)(*arguments, **options) if name != "fsync" else None

                known = paths if name == "replace" else arguments
                made = Call(len(self.calls) + 1, name, paths[-1], really, tuple(known))
                self.calls.append(f"{name} {paths[-1].name}")
                return self._action(made)

        return call


def _path(what: int | str, folder: int | None) -> Path:
    if isinstance(what, int):
        return Path(os.readlink(f"/proc/self/fd/{what}"))
    return Path(what) if folder is None else _path(folder, None) / what


def at(number: int, action: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """``action`` for one call, all others happen."""
    return lambda call: action(call) if call.number == number else call.really()


def fails(code: int) -> Callable[[Call], Any]:
    def action(call: Call) -> Any:
        raise OSError(code, os.strerror(code))

    return action


def short_write(call: Call) -> Any:
    """Writes the first half; what is no write fails."""
    if call.name != "pwrite":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    descriptor, data, offset = call.arguments
    return os.pwrite(descriptor, data[: max(1, len(data) // 2)], offset)


def torn_write(call: Call) -> Any:
    """Writes the first half, then there is no room."""
    if call.name == "pwrite":
        short_write(call)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def dies(call: Call, *, after: bool) -> Any:
    """SIGKILL before the call, or when it is done."""
    if after:
        call.really()
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_child(work: Callable[[], Any]) -> int:
    """Runs ``work`` in a forked process; 0 if it came to its end, 1 if it raised, -9 if it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Power:
    """Knows what a power cut would take away: bytes that are not synced, and names in folders that are not.

    ``cut`` puts zeros in the place of the former and undoes the latter, last change first, but for those that ``keeps``
    chooses: names reach a disk in any order until their folder is synced. It is asked with the place of a change among
    those that are not synced and with their number. What is lost takes along whatever was done to the same name later,
    and all within a folder that is lost.
    """

    def __init__(self, attic: Path, keeps: Callable[[int, int], bool] = lambda place, count: False) -> None:
        self._attic, self._keeps = attic, keeps
        self._bytes: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        self._names: list[_Change] = []
        attic.mkdir(exist_ok=True)

    def run(self, call: Call) -> Any:
        """Lets a call happen and remembers it."""
        if call.name == "pwrite":
            descriptor, data, offset = call.arguments
            inode = os.fstat(descriptor).st_ino
            if inode not in self._bytes:
                self._bytes[inode] = os.dup(descriptor), []
            self._bytes[inode][1].append((offset, len(data)))
        elif call.name == "fsync":
            if call.path.is_dir():
                self._names = [n for n in self._names if n.folder != call.path]
            else:
                kept, _ = self._bytes.pop(os.fstat(call.arguments[0]).st_ino, (None, None))
                if kept is not None:
                    os.close(kept)
        elif undo := self._undo(call):
            paths = {call.path, Path(call.arguments[0])} if call.name == "replace" else {call.path}
            self._names.append(_Change(call.path.parent, paths, undo))
        return call.really()

    def _undo(self, call: Call) -> Callable[[], Any] | None:
        path = call.path
        backup = self._attic / str(call.number)
        if call.name in ("replace", "unlink") and path.exists():
            os.link(path, backup)

        def restore() -> None:
            if call.name == "replace" and path.exists():
                path.rename(call.arguments[0])
            if backup.exists():
                backup.rename(path)

        if call.name in ("replace", "unlink"):
            return restore
        if call.name == "open" and not path.exists():
            return lambda: path.unlink(missing_ok=True)
        if call.name == "mkdir":
            return lambda: shutil.rmtree(path, ignore_errors=True)
        return path.mkdir if call.name == "rmdir" else None

    def cut(self) -> None:
        for descriptor, places in self._bytes.values():
            for offset, count in places:
                os.pwrite(descriptor, bytes(count), offset)
        for change in reversed(self._lost()):
            with suppress(FileNotFoundError):  # the folder around it is gone for good
                change.undo()
        os.kill(os.getpid(), signal.SIGKILL)

    def _lost(self) -> list[_Change]:
        lost: list[_Change] = []
        gone: set[Path] = set()
        for place, change in enumerate(self._names):
            touched = change.paths | {parent for path in change.paths for parent in path.parents}
            if touched & gone or not self._keeps(place, len(self._names)):
                lost.append(change)
                gone |= change.paths
        return lost


@dataclass
class _Change:
    """A change of names in ``folder`` that a power cut may take away; ``paths`` are the names."""

    folder: Path
    paths: set[Path]
    undo: Callable[[], Any]
