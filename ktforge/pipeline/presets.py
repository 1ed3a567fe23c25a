"""The pipelines that commands stand for, as the content of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader
from ktforge.pipeline.pipeline import Pipeline
from ktforge.readback.loader import packed_loader, require_packed

#: What KTransformers' backend RAWINT4 reads: INT4 in groups of so many columns.
RAWINT4_GROUP = 32


def convert(
    source: Path,
    output: Path,
    *,
    quantize: str,
    layout: str,
    group_size: int | None = None,
    threadpool_count: int | None = None,
    input_type: str = "auto",
    writer: str = "safetensors",
    cpuinfer_threads: int | None = None,
) -> dict[str, Any]:
    """``ktforge convert``; options that are None are left to the stages' defaults."""
    groups = {} if group_size is None else {"group_size": group_size}
    parts = {} if threadpool_count is None else {"threadpool_count": threadpool_count}
    return {
        "loader": _loader(source),
        "preprocess": [{"use": "split-experts"}, {"use": "moe-to-bf16", "input_type": input_type}],
        "quantize": {"use": quantize, **groups},
        "layout": {"use": layout, **parts},
        "writer": {"use": writer, "path": str(output)},
        "runtime": {"cpuinfer_threads": cpuinfer_threads},
    }


def to_bf16(source: Path, output: Path, preprocess: str = "moe-to-bf16") -> dict[str, Any]:
    """``ktforge moe-to-bf16``; with another preprocessor, what that one alone makes of a checkpoint."""
    return {
        "loader": _loader(source),
        "preprocess": [{"use": preprocess}],
        "writer": {"use": "safetensors", "path": str(output)},
    }


def _loader(source: Path) -> dict[str, Any]:
    return {"use": "auto", "path": str(source)}


def dequantize_pipeline(source: Path, output: Path, registry: Registry) -> Pipeline:
    """The pipeline that turns the quantised folder ``source`` into a BF16 checkpoint at ``output``.

    The layout is the one that the folder's manifest names, or the installed one that finds packed weights there, so
    that files of other programs can be read too. Raises CheckpointError if there is none.
    """
    inner = registry.build("loader", "auto", {"path": source})
    assert isinstance(inner, Loader)
    loader = packed_loader(inner, require_packed(inner, registry))
    return Pipeline(loader=loader, writer=registry.build("writer", "safetensors", {"path": output}))
