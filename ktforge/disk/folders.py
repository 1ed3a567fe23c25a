"""Folders that a run holds open, and what is in them."""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Folders that are held open by their paths: what is done to a path below one is done in that very folder, even if
    it was moved and another is in its place. No symbolic link below it is followed. Other paths are the system's.

    Every OSError names its file.
    """

    def __init__(self) -> None:
        self.held: dict[Path, int] = {}

    def hold(self, folder: Path) -> None:
        with naming(folder):
            self.held[folder] = os.open(folder, _OPEN)

    def close(self) -> None:
        while self.held:
            os.close(self.held.popitem()[1])

    @contextmanager
    def place(self, path: Path) -> Iterator[tuple[str, int | None]]:
        """A file's or folder's name, and the descriptor of the folder that it is in; of a path below no folder that is
        held, the path and None."""
        root = self._root(path)
        if root is None:
            yield str(path), None
            return
        *between, name = path.relative_to(root).parts
        above, opened = self.held[root], []
        try:
            for part in between:
                above = os.open(part, _OPEN | os.O_NOFOLLOW, dir_fd=above)
                opened.append(above)
            yield name, above
        finally:
            for descriptor in opened:
                os.close(descriptor)

    @contextmanager
    def opened(self, folder: Path) -> Iterator[int]:
        """The descriptor of a folder, for as long as it takes."""
        if folder in self.held:
            yield self.held[folder]
            return
        with self.place(folder) as (name, above):
            descriptor = os.open(name, _OPEN if above is None else _OPEN | os.O_NOFOLLOW, dir_fd=above)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def stat(self, path: Path) -> os.stat_result | None:
        """Of a link below a folder that is held, what is said of the link; None if nothing is there."""
        with naming(path):
            try:
                with self.place(path) as (name, above):
                    return os.stat(name, dir_fd=above, follow_symlinks=above is None)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def size(self, path: Path) -> int:
        """Bytes of a file. Raises FileNotFoundError if it is not there."""
        found = self.stat(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return found.st_size

    def exists(self, path: Path) -> bool:
        return self.stat(path) is not None

    def is_folder(self, path: Path) -> bool:
        found = None if path in self.held else self.stat(path)
        return path in self.held or (found is not None and stat.S_ISDIR(found.st_mode))

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, in order of name."""
        with naming(folder), self.opened(folder) as descriptor:
            return sorted(os.listdir(descriptor))

    def files(self, folder: Path, *, hidden: bool = True) -> Iterator[Path]:
        """All but folders in a folder and those below it, in order of name; folders behind links count as files.

        Raises OSError for a folder that cannot be looked into. Without ``hidden``, what begins with a dot is left out.
        """
        for path in (folder / name for name in self.names(folder) if hidden or not name.startswith(".")):
            if self.is_folder(path) and not path.is_symlink():
                yield from self.files(path, hidden=hidden)
            else:
                yield path

    def glob(self, folder: Path, pattern: str) -> list[Path]:
        """What a loader would find there by a pattern, behind links too."""
        with naming(folder), self.opened(folder) as descriptor:
            return [folder / found for found in glob.glob(pattern, dir_fd=descriptor, include_hidden=True)]

    def _root(self, path: Path) -> Path | None:
        return next((parent for parent in path.parents if parent in self.held), None)


#: For what is no run's.
NONE = Folders()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has every OSError name its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
