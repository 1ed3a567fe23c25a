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
from typing import TYPE_CHECKING, Any

import xxhash

from ktforge import files
from ktforge.errors import CheckpointError, OutputError
from ktforge.provenance import unversioned, versions

if TYPE_CHECKING:
    from ktforge.plan import Plan

JOURNAL = "journal.jsonl"
#: Version of the journal's own form.
JOURNAL_FORMAT = "ktforge-journal/1"


class Journal:
    """An open journal. ``fingerprint`` and ``overwrite`` are those of the run that began it.

    ``written`` maps the tensors in place to the xxh3-128 of their bytes, in hex; ``staged`` says that all is ready to
    be published.
    """

    def __init__(self, path: Path) -> None:
        """Opens the journal at ``path``; one that is missing or was never begun has an empty ``fingerprint``."""
        self.path = path
        self.fingerprint: dict[str, Any] = {}
        self.overwrite = self.staged = False
        self.written: dict[str, str] = {}
        self._end = 0
        if path.is_file():
            for line, record in _whole_lines(path.read_bytes()):
                self._end += len(line)
                self._take(record)
        self._descriptor: int | None = None

    def begin(self, fingerprint: dict[str, Any], *, overwrite: bool) -> None:
        """Writes the first line of a new journal."""
        record = {"journal": JOURNAL_FORMAT, "overwrite": overwrite, "fingerprint": fingerprint}
        self._append(record)
        files.sync_folder(self.path.parent)

    def add(self, tensors: Mapping[str, str]) -> None:
        """Notes tensors (name → hash) whose bytes and file names are synced."""
        self._append({"written": dict(tensors)})

    def add_staged(self) -> None:
        """Notes that every file is complete and synced."""
        self._append({"staged": True})

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: dict[str, Any]) -> None:
        if self._descriptor is None:
            self._descriptor = files.create(self.path, self._end)  # cuts off a line that is not whole
        line = json.dumps(record).encode() + b"\n"
        files.write_at(self._descriptor, line, self._end, self.path)
        files.sync(self._descriptor, self.path)
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


#: What the entries of a line are.
_TYPES = {"journal": str, "overwrite": bool, "fingerprint": dict, "written": dict, "staged": bool}


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


def fingerprint(plan: Plan) -> dict[str, Any]:
    """What the bytes of an output depend on; ``{}`` if the loader names no files, since then nothing can be compared.

    Raises CheckpointError if a source file is no longer the one that was planned with.
    """
    if not plan.sources:
        return {}
    pipeline = plan.pipeline.to_dict()
    for stage in ("loader", "writer"):  # a folder may be called by another name, or be elsewhere by now
        pipeline[stage].pop("path", None)
    names = xxhash.xxh3_128()
    for file in plan.files:
        names.update(file.path.encode() + b"\0")
        names.update(bytes(file.header))
    sources, folder = {}, plan.pipeline.loader.folder()
    for source in plan.sources:
        found = source.path.stat()
        if found.st_size != source.nbytes:
            raise CheckpointError(f"{source.path} changed while it was looked at: start again when it is complete")
        is_inside = folder is not None and source.path.is_relative_to(folder)
        name = os.path.relpath(source.path, folder) if is_inside else source.path.name
        sources[name] = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "header": source.header_hash}
    return {
        "pipeline": pipeline,
        "versions": versions(plan.pipeline),
        "code": unversioned(plan.pipeline),
        "formats": list(plan.formats),
        "methods": list(plan.methods),
        "config.json": xxhash.xxh3_128_hexdigest(plan.config_json or b""),
        "source": sources,
        "output files": names.hexdigest(),
    }


#: What follows from the pipeline: where that has changed, a user is not told of these.
_DERIVED = ("formats", "methods", "config.json", "output files")


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], again: str) -> None:
    """Raises OutputError with one sentence for each thing that differs between two fingerprints; ``again`` are the
    options that start over."""
    derived = _DERIVED if before.get("pipeline") != now.get("pipeline") else ()
    one, other = ({k: v for k, v in of.items() if k not in ("source", *derived)} for of in (before, now))
    changes = [_change(key, *values) for key, *values in _differences("", one, other)]
    changes += _source_changes(before.get("source"), now.get("source"))
    if changes:
        raise OutputError(
            *changes[:20],
            *([f"and {len(changes) - 20:,} more of the kind"] if len(changes) > 20 else []),
            f"so the unfinished output in {folder} cannot go on: put back what it was begun with, "
            f"or start over with {again}",
        )


def _differences(key: str, before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        if before.get("use") != now.get("use"):  # another stage has other options
            before, now = {"use": before.get("use")}, {"use": now.get("use")}
        for name in sorted(before.keys() | now.keys()):
            yield from _differences(f"{key}/{name}" if key else name, before.get(name), now.get(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, pair in enumerate(zip(before, now, strict=True)):
            yield from _differences(f"{key}/{i}", *pair)
    elif before != now:
        yield key, before, now


def _change(key: str, before: Any, now: Any) -> str:
    part, _, rest = key.partition("/")
    if part == "code":
        return f"the code of {rest or 'the plugins'} has changed"
    if part == "config.json":
        return "config.json has changed"
    if part == "output files":
        return "the names or sizes of the output's tensors have changed"
    name = rest.replace("/", ".") or part
    what = {"versions": f"the version of {name}", "formats": "a format", "methods": "a method"}.get(part, name)
    return f"{what} was {_text(before)} and is {_text(now)}"


def _text(value: Any) -> str:
    """A value as a pipeline file has it; of stages, their names."""
    if value is None:
        return "not there"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "empty"
    if isinstance(value, Mapping) and isinstance(value.get("use"), str):
        return str(value["use"])
    return value if isinstance(value, str) else json.dumps(value)


def _source_changes(before: Any, now: Any) -> Iterator[str]:
    """A sentence for each file of the source."""
    before, now = ({} if not isinstance(of, Mapping) else of for of in (before, now))
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            yield f"{name} is {'gone' if new is None else 'new'} in the source"
        elif old.get("bytes") != new.get("bytes"):
            yield f"{name} has changed: it had {old.get('bytes')} bytes, and has {new.get('bytes')}"
        elif old.get("header") != new.get("header"):
            yield f"{name} has changed: its header is another"
        elif old != new:
            yield f"{name} may have changed: its modification time is another, with the same size and header"
