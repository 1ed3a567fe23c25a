"""Whether an unfinished output can go on: what its bytes depend on, then and now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ktforge.contract.plan import Plan
from ktforge.errors import OutputError
from ktforge.output.provenance import unversioned, versions
from ktforge.text import first_of


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
        plan.identities[source.path].check(source.path, found, "looked at")
        is_inside = folder is not None and source.path.is_relative_to(folder)
        name = os.path.relpath(source.path, folder) if is_inside else source.path.name
        sources[name] = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "header": source.header_hash}
    return {
        "pipeline": pipeline,
        "versions": versions(plan.pipeline),
        "code": unversioned(plan.pipeline),
        "formats": list(plan.formats),
        "methods": list(plan.methods),
        "documents": dict(plan.documents),
        "config.json": xxhash.xxh3_128_hexdigest(plan.config_json or b""),
        "inputs": {_input_name(path, plan): found for path, found in plan.inputs.items()},
        "source": sources,
        "output files": names.hexdigest(),
    }


def _input_name(path: Path, plan: Plan) -> str:
    """By its name, for its folder may be another by now; where two have the same, by its path."""
    return path.name if [p.name for p in plan.inputs].count(path.name) == 1 else str(path)


#: What follows from the pipeline and the source's config.json: where they have changed, a user is not told of these.
_DERIVED = ("formats", "methods", "config.json", "output files")


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], again: str) -> None:
    """Raises OutputError with one sentence for each thing that differs between two fingerprints; ``again`` are the
    options that start over."""
    derived = _DERIVED if any(before.get(key) != now.get(key) for key in ("pipeline", "documents")) else ()
    one, other = ({k: v for k, v in of.items() if k not in ("source", *derived)} for of in (before, now))
    changes = [_change(key, *values) for key, *values in _differences("", one, other)]
    changes += _source_changes(before.get("source"), now.get("source"))
    if changes:
        raise OutputError(
            *first_of(changes),
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
    if part in ("documents", "inputs"):
        return f"{rest} has changed" if before and now else f"{rest} is {'gone' if now is None else 'new'}"
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
