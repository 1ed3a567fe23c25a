"""The file layer: every change that ktforge makes to a disk is a call in this module.

Tests put another object in the place of ``os`` here, so that any of these calls can fail, fall short, or be the last.
Every OSError that leaves this module names its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from ktforge.disk import system
from ktforge.errors import CheckpointError

#: Bytes of a file that is copied, at a time.
CHUNK = 1 << 20


def open_file(path: Path) -> int:
    """Opens a file for reading and writing, made if it is missing, and returns its descriptor.

    A symbolic link in its place is an error: it could lead out of the output folder.
    """
    with _naming(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def create(path: Path, nbytes: int) -> int:
    """Opens a file of so many bytes for writing and returns its descriptor; what an earlier run put there stays."""
    descriptor = open_file(path)
    try:
        truncate(descriptor, nbytes, path)
        with _naming(path):
            system.reserve(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def truncate(descriptor: int, nbytes: int, path: Path) -> None:
    """Cuts a file off or extends it with zeros, which take no room on the disk yet."""
    with _naming(path):
        os.ftruncate(descriptor, nbytes)


def write_at(descriptor: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    """Writes all of ``data`` at ``offset``, however often the system writes less than it was given."""
    with _naming(path):
        left = memoryview(data)
        while left:
            count = os.pwrite(descriptor, left, offset)
            left, offset = left[count:], offset + count


def sync(descriptor: int, path: Path) -> None:
    """Returns when the file's content would survive a power cut."""
    with _naming(path):
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Returns when the names in ``folder`` would survive a power cut."""
    with _naming(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Makes a file with this content, synced; an earlier one of the name is replaced."""
    descriptor = create(path, 0)
    try:
        write_at(descriptor, data, 0, path)
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def copy_file(opened: BinaryIO, source: Path, path: Path) -> str:
    """Copies what is left to read of ``opened``, which ``source`` names, synced, and returns its xxh3-128 in hex.

    Raises CheckpointError if it cannot be read.
    """
    descriptor = create(path, 0)
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


def make_folders(folder: Path) -> None:
    """Makes ``folder`` and its parents, those that are missing, synced."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with _naming(folder):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another thread was faster
            return
    sync_folder(folder.parent)


def rename(path: Path, target: Path) -> None:
    """Gives a file its other name, in one step; a file of that name is replaced."""
    with _naming(target):
        os.replace(path, target)


def remove(path: Path) -> None:
    """Removes a file or a symbolic link, if it is there."""
    with _naming(path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def remove_folder(folder: Path) -> None:
    """Removes a folder that is empty."""
    with _naming(folder):
        os.rmdir(folder)


def remove_tree(folder: Path) -> None:
    """Removes a folder and all in it, in order of name."""
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            remove_tree(path)
        else:
            remove(path)
    remove_folder(folder)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
