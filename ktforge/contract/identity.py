"""Which file it is: what tells it from another that takes its place, and from what it may become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ktforge.errors import CheckpointError


class Identity(NamedTuple):
    """A file as it was found; ``mtime_ns`` are nanoseconds since the epoch."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Identity:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check(self, path: Path, found: os.stat_result, doing: str = "read") -> None:
        """Raises CheckpointError if what was found at ``path`` by now, or opened, is another file or was changed."""
        now = Identity.of(found)
        if now == self:
            return
        if now.nbytes != self.nbytes:
            what = f"it had {self.nbytes:,} bytes, and has {now.nbytes:,}"
        elif (now.device, now.inode) != (self.device, self.inode):
            what = "another file has taken its place"
        else:
            what = "it was modified"
        raise CheckpointError(f"{path} changed while it was {doing}: {what}")
