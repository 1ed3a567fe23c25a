"""What an unfinished output holds already, and what it is being made from: the memory of a run that was cut off.

The journal is a file of JSON lines in the staging folder. The first says what the output is made from (its
fingerprint); each other one lists tensors that are in place and synced, or says that all is ready to be published.
A line counts when it is whole, so a journal that is cut off anywhere says less than was done, never more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktforge.disk import writing
from ktforge.disk.folders import NONE, Folders
from ktforge.disk.reading import open_regular
from ktforge.errors import OutputError

#: Version of the journal's own form.
JOURNAL_FORMAT = "ktforge-journal/1"


class Journal:
    """An open journal. ``fingerprint`` and ``overwrite`` are those of the run that began it.

    ``written`` maps the tensors in place to the xxh3-128 of their bytes, in hex; ``staged`` says that all tensors are,
    so that files may have been published, and ``documents`` maps what else is ready to be to the hash of its content.
    """

    def __init__(self, path: Path, folders: Folders = NONE) -> None:
        """Opens the journal at ``path``; one that is missing or was never begun has an empty ``fingerprint``."""
        self.path = path
        self._folders = folders
        self.fingerprint: dict[str, Any] = {}
        self.overwrite = self.staged = False
        self.written: dict[str, str] = {}
        self.documents: dict[str, str] = {}
        self._end = 0
        if folders.exists(path):
            with open_regular(path, folders) as opened:
                content = opened.read()
            for line, record in _whole_lines(content):
                self._end += len(line)
                self._take(record)
        self._descriptor: int | None = None

    def begin(self, fingerprint: dict[str, Any], *, overwrite: bool) -> None:
        """Writes the first line of a new journal."""
        record = {"journal": JOURNAL_FORMAT, "overwrite": overwrite, "fingerprint": fingerprint}
        self._append(record)
        writing.sync_folder(self.path.parent, self._folders)

    def add(self, tensors: Mapping[str, str]) -> None:
        """Notes tensors (name → hash) whose bytes and file names are synced."""
        self._append({"written": dict(tensors)})

    def add_staged(self, documents: Mapping[str, str]) -> None:
        """Notes that every weight file is complete and synced, and so are these others (name → hash), and no more."""
        self._append({"staged": True, "documents": dict(documents)})

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: dict[str, Any]) -> None:
        if self._descriptor is None:
            self._descriptor = writing.create(self.path, self._end, self._folders)  # cuts off a line that is not whole
        line = json.dumps(record).encode() + b"\n"
        writing.write_at(self._descriptor, line, self._end, self.path)
        writing.sync(self._descriptor, self.path)
        self._end += len(line)
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if "journal" in record:
            if record["journal"] != JOURNAL_FORMAT:
                raise OutputError(
                    f"{self.path.parent.parent} was begun by a ktforge that keeps another journal: "
                    "finish it with that one, or remove " + str(self.path.parent)
                )
            self.fingerprint, self.overwrite = record.get("fingerprint", {}), record.get("overwrite", False)
        self.written.update(record.get("written", {}))
        self.staged |= record.get("staged", False)
        self.documents = record.get("documents", self.documents)


#: What the entries of a line are.
_TYPES = {"journal": str, "overwrite": bool, "fingerprint": dict, "written": dict, "staged": bool, "documents": dict}


def _whole_lines(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines and what they say, up to the first one that is cut off or not of this journal's form."""
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n") or not isinstance(record, dict):
            return
        if not all(isinstance(value, _TYPES.get(key, object)) for key, value in record.items()):
            return
        yield line, record
