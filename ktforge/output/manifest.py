"""ktforge_manifest.json: what an output was made from, and how."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from ktforge.contract.checks import blame
from ktforge.contract.plan import Plan
from ktforge.contract.tensors import TensorSpec, UnitSpec
from ktforge.disk.marks import SAFETENSORS
from ktforge.output.hashing import joined_hash

#: Version of the manifest's own form.
MANIFEST_FORMAT = "ktforge-manifest/1"
#: What all published files are listed under, the manifest itself left out.
FILES = "files"


def manifest(plan: Plan) -> dict[str, Any]:
    """The manifest of a plan, as far as a plan knows it: all but the hashes of the files.

    It holds no times and no machine's name: equal inputs give equal manifests.
    """
    pipeline = plan.pipeline
    folder = pipeline.loader.folder()
    return {
        "format": MANIFEST_FORMAT,
        "ktforge": version("ktforge"),
        "formats": list(plan.formats),
        "methods": list(plan.methods),
        "numa_nodes": pipeline.layout.numa_nodes if pipeline.layout else None,
        "cpuinfer_threads": pipeline.runtime.cpuinfer_threads,
        "pipeline": pipeline.to_dict(),
        "source": [
            {"file": _name(s.path, folder), "bytes": s.nbytes, "header_xxh3_128": s.header_hash} for s in plan.sources
        ],
        "inputs": [{"file": path.name, "xxh3_128": found} for path, found in plan.inputs.items()],
        "side_files": [str(p) for p in plan.side_files],
        **_lost_names(plan),
        "left_out": [t.name for t in plan.left_out],
    }  # fmt: skip


def _name(file: Path, folder: Path | None) -> str:
    """A source file as its folder knows it: shards in sub-folders may have equal names."""
    return file.relative_to(folder).as_posix() if folder is not None and file.is_relative_to(folder) else file.name


def _lost_names(plan: Plan) -> dict[str, Any]:
    """What the layout's own inverse would not give back of the source's names: for ``ktforge dequantize``."""
    layout = plan.pipeline.layout
    if layout is None:
        return {}
    renamed = {
        tensor.name: result.unit.tensors[role].name
        for result in plan.results
        for role, tensor in (result.renamed or {}).items()
        if layout.original(tensor.name) != result.unit.tensors[role].name
    }
    experts: dict[int, dict[str, str]] = {}
    for unit in (r.unit for r in plan.results if r.unit.is_expert):
        if unit.layer is not None:
            experts.setdefault(unit.layer, {}).update(_pattern(unit, role, t) for role, t in unit.tensors.items())
    return {"renamed": renamed, "experts": experts, "fused": _fused(plan), "settled": dict(plan.settled)}


def _fused(plan: Plan) -> dict[int, dict[str, Any]]:
    """Layer → name of a tensor that held all its experts → how."""
    found: dict[int, dict[str, Any]] = {}
    for planned in (unit for unit in plan.units if unit.source.fused):
        units: tuple[UnitSpec, ...] = (planned.source,)
        for stage, made in zip(plan.pipeline.preprocess, planned.steps, strict=True):
            for unit in units:
                if unit.fused and unit.layer is not None:
                    with blame(stage, unit.name):
                        apart = {name: how._asdict() for name, how in stage.taken_apart(unit).items()}
                    found.setdefault(unit.layer, {}).update(apart)
            units = made
    return {layer: apart for layer, apart in found.items() if apart}


def _pattern(unit: UnitSpec, role: str, tensor: TensorSpec) -> tuple[str, str]:
    """A weight's role, and its name with ``{expert}`` for the number of the expert, ``…experts.{expert}.w1.weight``."""
    number = f".{unit.expert}."
    before, _, behind = tensor.name.rpartition(number)
    return role, f"{before}.{{expert}}.{behind}"


def weight_files(plan: Plan, written: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What the manifest says of each weight file; ``written`` maps the tensors to the xxh3-128 of their bytes, in hex.

    ``parts`` are the sizes of what :func:`~ktforge.output.hashing.joined_hash` goes over, where the header of the file
    does not say them.
    """
    for file in plan.files:
        tensors = [t for t in file.tensors if t.nbytes]
        digests = [bytes.fromhex(written[t.name]) for t in tensors]
        sizes = [t.nbytes for t in tensors]
        if len(file.header):
            digests.insert(0, xxhash.xxh3_128_digest(bytes(file.header)))
            sizes.insert(0, len(file.header))
        entry: dict[str, Any] = {"file": file.path, "bytes": file.nbytes}
        if len(sizes) > 1 and not file.path.endswith(SAFETENSORS):
            entry["parts"] = sizes
        yield {**entry, "xxh3_128": joined_hash(digests)}


def manifest_json(plan: Plan, files: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of ktforge_manifest.json with what it says of every other published file."""
    return (json.dumps({**manifest(plan), FILES: list(files)}, indent=2) + "\n").encode()
