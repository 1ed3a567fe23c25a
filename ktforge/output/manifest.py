"""ktforge_manifest.json: what an output was made from, and how."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ktforge.contract.checks import blame
from ktforge.contract.plan import Plan
from ktforge.contract.tensors import TensorSpec, UnitSpec

#: Version of the manifest's own form.
MANIFEST_FORMAT = "ktforge-manifest/1"


def manifest(plan: Plan) -> dict[str, Any]:
    """The manifest of a plan. It holds no times and no machine's name: equal inputs give equal manifests."""
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
    for planned in plan.units:
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


def manifest_json(plan: Plan) -> bytes:
    """The bytes of ktforge_manifest.json."""
    return (json.dumps(manifest(plan), indent=2) + "\n").encode()
