"""The file layer: every change that ktforge makes to a disk is a call in this module.

Tests put another object in the place of ``os`` here, so that any of these calls can fail, fall short, or be the last.
Every OSError that leaves this module names its file. What is given :class:`Folders` works in those, held open, and not
in what is at their paths by then.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

import xxhash

from ktforge.disk import system
from ktforge.disk.folders import NONE, Folders, naming
from ktforge.errors import CheckpointError

#: Bytes of a file that is copied, at a time.
CHUNK = 1 << 20


def open_file(path: Path, folders: Folders = NONE) -> int:
    """Opens a file for reading and writing, made if it is missing, and returns its descriptor.

    A symbolic link in its place is an error: it could lead out of the output folder. So is a pipe, which is looked at
    once it is open, or a device.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with naming(path):
        with folders.place(path) as (name, above):
            descriptor = os.open(name, flags, 0o644, dir_fd=above)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "a pipe or a device is in its place", str(path))
        return descriptor


def create(path: Path, nbytes: int, folders: Folders = NONE) -> int:
    """Opens a file of so many bytes for writing and returns its descriptor; what an earlier run put there stays."""
    descriptor = open_file(path, folders)
    try:
        truncate(descriptor, nbytes, path)
        with naming(path):
            system.reserve(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def truncate(descriptor: int, nbytes: int, path: Path) -> None:
    """Cuts a file off or extends it with zeros, which take no room on the disk yet."""
    with naming(path):
        os.ftruncate(descriptor, nbytes)


def write_at(descriptor: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    """Writes all of ``data`` at ``offset``, however often the system writes less than it was given."""
    with naming(path):
        left = memoryview(data)
        while left:
            count = os.pwrite(descriptor, left, offset)
            left, offset = left[count:], offset + count


def sync(descriptor: int, path: Path) -> None:
    """Returns when the file's content would survive a power cut."""
    with naming(path):
        os.fsync(descriptor)


def sync_folder(path: Path, folders: Folders = NONE) -> None:
    """Returns when the names in a folder would survive a power cut."""
    with naming(path), folders.opened(path) as descriptor:
        os.fsync(descriptor)


def write_file(path: Path, data: bytes, folders: Folders = NONE) -> None:
    """Makes a file with this content, synced; an earlier one of the name is replaced."""
    descriptor = create(path, 0, folders)
    try:
        write_at(descriptor, data, 0, path)
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def copy_file(opened: BinaryIO, source: Path, path: Path, folders: Folders = NONE) -> str:
    """Copies what is left to read of ``opened``, which ``source`` names, synced, and returns its xxh3-128 in hex.

    Raises CheckpointError if it cannot be read.
    """
    descriptor = create(path, 0, folders)
    try:
        offset, found = 0, xxhash.xxh3_128()
        while data := _read(opened, source):
            found.update(data)
            write_at(descriptor, data, offset, path)
            offset += len(data)
        sync(descriptor, path)
        return found.hexdigest()
    finally:
        os.close(descriptor)


def _read(opened: BinaryIO, source: Path) -> bytes:
    try:
        return opened.read(CHUNK)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}") from error


def make_folders(path: Path, folders: Folders = NONE) -> None:
    """Makes a folder and its parents, those that are missing, synced."""
    if folders.is_folder(path):
        return
    make_folders(path.parent, folders)
    with naming(path):
        try:
            with folders.place(path) as (name, above):
                os.mkdir(name, dir_fd=above)
        except FileExistsError:  # another thread was faster
            return
    sync_folder(path.parent, folders)


def rename(path: Path, target: Path, folders: Folders = NONE) -> None:
    """Gives a file its other name, in one step; a file of that name is replaced."""
    with naming(target), folders.place(path) as (name, above), folders.place(target) as (other, there):
        os.replace(name, other, src_dir_fd=above, dst_dir_fd=there)


def remove(path: Path, folders: Folders = NONE) -> None:
    """Removes a file or a symbolic link, if it is there."""
    with naming(path):
        try:
            with folders.place(path) as (name, above):
                os.unlink(name, dir_fd=above)
        except FileNotFoundError:
            return


def remove_folder(path: Path, folders: Folders = NONE) -> None:
    """Removes a folder that is empty."""
    with naming(path), folders.place(path) as (name, above):
        os.rmdir(name, dir_fd=above)


def remove_tree(path: Path, folders: Folders = NONE) -> None:
    """Removes a folder and all in it, in order of name."""
    for name in folders.names(path):
        if folders.is_folder(path / name):
            remove_tree(path / name, folders)
        else:
            remove(path / name, folders)
    remove_folder(path, folders)
