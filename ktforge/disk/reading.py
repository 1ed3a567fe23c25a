"""Strangers' files, read with care."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ktforge.disk.folders import NONE, Folders, naming
from ktforge.errors import CheckpointError

JSON_LIMIT = 100 * 1000 * 1000
#: What Git LFS leaves in place of a file that was not fetched (https://git-lfs.com, pointer specification).
POINTER = b"version https://git-lfs.github.com/spec/v1"
POINTER_LIMIT = 1024


def pointer_problem(path: Path) -> str | None:
    """What to say about a Git-LFS pointer in place of a file; None for anything else."""
    if not is_file(path) or path.stat().st_size > POINTER_LIMIT:
        return None
    try:
        with open_regular(path) as opened:
            if opened.read(len(POINTER)) != POINTER:
                return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return f"{path} is a Git-LFS pointer, not the file itself: run `git lfs pull` in its repository"


#: Bytes that are hashed at a time.
CHUNK = 1 << 20


def open_regular(path: Path, folders: Folders = NONE) -> BinaryIO:
    """Opens a file for reading, unbuffered. Raises OSError, and CheckpointError for a pipe, a socket or a device, which
    is looked at once it is open: waiting for one could take for ever."""
    with naming(path), folders.place(path) as (name, above):
        links = 0 if above is None else os.O_NOFOLLOW
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | links, dir_fd=above)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a file that has an end: it is a folder, a pipe or a device")
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def content_hash(opened: BinaryIO) -> str:
    """The xxh3-128 of what is left to read of a file, in hex. Raises OSError if it cannot be read."""
    found = xxhash.xxh3_128()
    while data := opened.read(CHUNK):
        found.update(data)
    return found.hexdigest()


def is_file(path: Path) -> bool:
    """Whether a file is there; not where its name is longer than the system allows."""
    try:
        return path.is_file()
    except OSError:
        return False


def parse_json(text: bytes, *, any_number: bool = False) -> Any:
    """Strict JSON: raises ValueError for a key that an object has twice, and, unless ``any_number``, for NaN and
    Infinity; RecursionError if too deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key stands there twice")
        return made

    def number(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=None if any_number else number)


def read_json(
    path: Path, limit: int = JSON_LIMIT, *, any_number: bool = False, folders: Folders = NONE
) -> dict[str, Any]:
    """A JSON object from a file of at most ``limit`` bytes, or CheckpointError. ``any_number``: NaN and Infinity go, as
    Python's json writes them."""
    try:
        with open_regular(path, folders) as opened:
            if (size := os.fstat(opened.fileno()).st_size) > limit:
                raise CheckpointError(f"{path} has {size:,} bytes: too many to be what its name says")
            if pointer := pointer_problem(path):
                raise CheckpointError(pointer)
            value = parse_json(opened.read(), any_number=any_number)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download it again, or give the folder that holds it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error)[:200]}: download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
