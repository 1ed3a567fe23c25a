"""The pipelines that commands stand for, as the content of a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktforge.contract.presets import SAFETENSORS, Option, Preset
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader, Preprocessor
from ktforge.model.number_format import NumberFormat
from ktforge.pipeline.pipeline import Pipeline
from ktforge.readback.loader import packed_loader, require_packed


def convert(
    source: Path,
    output: Path,
    preset: Preset,
    *,
    given: Mapping[Option, Any] | None = None,
    input_type: str = "auto",
    cpuinfer_threads: int | None = None,
    follow_links: bool = False,
    layout: Mapping[str, Any] | None = None,
    fused: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``ktforge convert``; ``given`` are those of the command's options that the preset takes, ``layout`` options of
    the layout beside the preset's own, ``fused`` those of ``split-experts``."""
    stages = preset.stages(given or {})
    return {
        "loader": loader_of(source, follow_links=follow_links),
        "preprocess": [{"use": "split-experts", **(fused or {})}, {"use": "moe-to-bf16", "input_type": input_type}],
        "quantize": stages["quantize"],
        "layout": {**stages["layout"], **(layout or {})},
        "writer": {**stages["writer"], "path": str(output)},
        "runtime": {"cpuinfer_threads": cpuinfer_threads},
    }


def to_bf16(
    source: Path, output: Path, preprocess: str = "moe-to-bf16", *, follow_links: bool = False
) -> dict[str, Any]:
    """``ktforge moe-to-bf16``; with another preprocessor, what that one alone makes of a checkpoint."""
    return {
        "loader": loader_of(source, follow_links=follow_links),
        "preprocess": [{"use": preprocess}],
        "writer": {**SAFETENSORS, "path": str(output)},
    }


def weights_in_bf16(registry: Registry, *, dense: bool) -> tuple[Preprocessor, ...]:
    """What makes ordinary BF16 weights of any checkpoint; a dense model's may be in any format of its own."""
    names = ["split-experts", "moe-to-bf16"]
    if dense:
        formats = [e.cls for e in registry.entries() if issubclass(e.cls, NumberFormat)]
        names = [cls.name for cls in formats if not any(f.is_required() for f in cls.model_fields.values())]
    return tuple(registry.build("preprocess", name, {}) for name in names)


def loader_of(source: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """The loader of a checkpoint's folder; ``follow_links``: symbolic links of any file are followed."""
    return {"use": "auto", "path": str(source), **({"follow_links": True} if follow_links else {})}


def dequantize_pipeline(source: Path, output: Path, registry: Registry, *, follow_links: bool = False) -> Pipeline:
    """The pipeline that turns the quantised folder ``source`` into a BF16 checkpoint at ``output``.

    The layout is the one that the folder's manifest names, or the installed one that finds packed weights there, so
    that files of other programs can be read too. Raises CheckpointError if there is none.
    """
    inner = registry.build("loader", "auto", {"path": source, "follow_links": follow_links or None})
    assert isinstance(inner, Loader)
    loader = packed_loader(inner, require_packed(inner, registry))
    return Pipeline(loader=loader, writer=registry.build("writer", "safetensors", {"path": output}))
