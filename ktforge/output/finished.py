"""Whether an output folder holds exactly what a plan would write, so that nothing has to be done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ktforge.contract.plan import Plan
from ktforge.disk.marks import CONFIG, MANIFEST, PARTIAL, UNFINISHED
from ktforge.disk.reading import open_regular, read_json
from ktforge.errors import CheckpointError
from ktforge.output.manifest import FILES, manifest
from ktforge.output.provenance import unversioned, versions
from ktforge.output.publish import STALE

#: What ktforge's own stages are in; a manifest says their version.
_OWN = {"ktforge", "ktforge_plugins"}


def is_finished(plan: Plan, documents: Mapping[str, bytes] | None = None) -> bool:
    """Whether the output folder of ``plan`` holds its output, finished, and nothing else that passes for weights.

    That is so if the manifest there is the plan's, the files have its sizes and headers, and everything that they were
    made from is older. ``documents`` are compared where they are known. Where stages are not ktforge's own, no manifest
    says whether their code is still the same, so the answer is no.
    """
    folder = plan.pipeline.writer.folder()
    if folder is None or not plan.sources or not (folder / MANIFEST).is_file() or _is_in_work(folder):
        return False
    texts = dict(documents or {})
    if plan.config_json is not None:
        texts[CONFIG] = plan.config_json
    try:
        return (
            versions(plan.pipeline).keys() | unversioned(plan.pipeline).keys() <= _OWN
            and _said(read_json(folder / MANIFEST)) == _said(json.loads(json.dumps(manifest(plan))))
            and all(_first(folder / name, len(text) + 1) == text for name, text in texts.items())
            and _holds_files(plan, folder)
            and _changed(_inputs(plan)) <= (folder / MANIFEST).stat().st_mtime_ns
        )
    except (CheckpointError, OSError, ValueError):  # what a manifest says of paths may be none
        return False


def _is_in_work(folder: Path) -> bool:
    return (folder / PARTIAL).exists() or (folder / UNFINISHED).exists()


def _said(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with its folders as places on this machine, however they were written; and without the hashes of its
    files, which no plan knows."""
    manifest.pop(FILES, None)
    for stage in ("loader", "writer"):
        named = pipeline.get(stage) if isinstance(pipeline := manifest.get("pipeline"), dict) else None
        if isinstance(named, dict) and isinstance(named.get("path"), str):
            named["path"] = str(Path(named["path"]).resolve())
    return manifest


def _holds_files(plan: Plan, folder: Path) -> bool:
    """Whether the weight files are whole and begin as planned, with the side files beside them and no other weights."""
    for file in plan.files:
        path, header = folder / file.path, bytes(file.header)
        if path.stat().st_size != file.nbytes or _first(path, len(header)) != header:
            return False
    planned = {folder / file.path for file in plan.files}
    weights = {path for pattern in STALE if not pattern.endswith(".json") for path in folder.glob(pattern)}
    return weights <= planned and all((folder / name).is_file() for name in plan.side_files)


def _first(path: Path, count: int) -> bytes:
    with open_regular(path) as opened:
        return opened.read(count)


def _inputs(plan: Plan) -> Iterable[Path]:
    """All that the output was made from, the folder itself too, whose time tells of files that were exchanged."""
    source = plan.pipeline.loader.folder()
    side_files = [source, *(source / name for name in plan.side_files)] if source is not None else []
    return [*(file.path for file in plan.sources), *plan.inputs, *side_files]


def _changed(paths: Iterable[Path]) -> int:
    """When the last of these files was changed or put in its place, in nanoseconds."""
    return max(max(s.st_mtime_ns, s.st_ctime_ns) for s in (path.stat() for path in paths))
