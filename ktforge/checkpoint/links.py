"""Symbolic links in a checkpoint's folder: which are followed.

Weights are, wherever they lead: what is no safetensors file or archive of tensors is refused when it is opened. Any
other file goes into the output as it is, so a link in a stranger's repository could bring any file of a machine there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ktforge.disk.reading import open_regular
from ktforge.errors import CheckpointError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
#: Bytes; the library's own limit for a header.
_HEADER_LIMIT = 100_000_000


def check_links(folder: Path, paths: Iterable[Path], *, follow: bool) -> None:
    """Raises CheckpointError for a link out of the checkpoint that is not to be followed.

    Those are followed that lead to where links of weights lead, or to a cache of the hub: both are what people have who
    keep their weights elsewhere. ``follow``: all are.
    """
    here = folder.resolve()
    outside = [] if follow else [(p, t) for p in paths if not (t := p.resolve()).is_relative_to(here)]
    places = _places(folder) if outside else ()
    for path, target in outside:
        if not _is_blob(target) and not any(_lies_in(place, target) for place in places):
            raise CheckpointError(
                f"{path} is a link to {target}, outside the checkpoint and where no link of its weights leads: put the "
                "file itself there, or say --follow-links (follow_links: true under loader) if you know what it is"
            )


def _places(folder: Path) -> set[Path]:
    """The folders that links of weights lead to."""
    links = [p for pattern in _WEIGHTS for p in folder.glob(pattern) if p.is_symlink()]
    return {target.parent for p in links if _holds_weights(target := p.resolve())}


def _lies_in(place: Path, target: Path) -> bool:
    return target.is_relative_to(place) and not any(p.startswith(".") for p in target.relative_to(place).parts)


def _is_blob(target: Path) -> bool:
    """Whether a file is one of the hub's cache, whose ``snapshots/<revision>/<file>`` lead to ``blobs/<hash>``."""
    return target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()


def _holds_weights(file: Path) -> bool:
    """Whether a file begins as one of safetensors or as an archive of torch.save."""
    try:
        with open_regular(file) as opened:
            begin, size = opened.read(9), os.fstat(opened.fileno()).st_size
    except (OSError, CheckpointError):
        return False
    length = int.from_bytes(begin[:8], "little")
    return begin.startswith(b"PK\x03\x04") or (begin[8:] == b"{" and length <= min(size - 8, _HEADER_LIMIT))
