"""Downloads that have not finished, told by what the programs that make them leave beside the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

#: The ends of names that say so, in lower case. Some programs write the file itself under its name from the start, at
#: its full size, and such a file beside it: aria2, lftp, axel. The others give the file this name until it is whole:
#: Firefox, Transmission and JDownloader, Hugging Face's client, Chrome, Opera, Safari, wget-like scripts, qBittorrent,
#: uTorrent, BitComet, Free Download Manager, Xunlei, MEGA, rclone.
MARKS = frozenset(
    [
        ".aria2",
        ".lftp-pget-status",
        ".st",
        ".part",
        ".incomplete",
        ".crdownload",
        ".opdownload",
        ".download",
        ".downloading",
        ".!qb",
        ".!ut",
        ".bc!",
        ".fdmdownload",
        ".xltd",
        ".td",
        ".mega",
        ".partial",
    ]
)


def is_mark(name: str) -> bool:
    """Whether a file's name says that a download has not finished."""
    return os.path.splitext(name)[1].lower() in MARKS


def unfinished(files: Iterable[Path]) -> Iterator[str]:
    """What to say about each of these files that a download has not finished, whatever its size; where a file is a
    link, what it leads to may be the one."""
    listed: dict[Path, Sequence[str]] = {}
    for file in files:
        for place in dict.fromkeys([file, file.resolve()]):
            if place.parent not in listed:
                listed[place.parent] = [n for n in _names(place.parent) if is_mark(n)]
            mark = next((n for n in listed[place.parent] if os.path.splitext(n)[0] == place.name), None)
            if mark is not None:
                yield sentence(place, mark)
                break


def sentence(file: Path, mark: str) -> str:
    """Of a file that has ``mark`` beside it, or that has this name as long as it is not whole."""
    return (
        f"{file} has not been downloaded to its end: {mark} says so; let the download finish, or, if the file is "
        f"whole, remove {file.parent / mark}"
    )


def _names(folder: Path) -> Sequence[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
