from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ktforge.cli.options import InputPath, Output, Overwrite, Restart, Verify

NAME = "convert"


class InputType(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    auto = "auto"


class QuantMethod(StrEnum):
    int4 = "int4"
    int8 = "int8"


def command(
    input_path: InputPath,
    output: Output,
    quant_method: Annotated[QuantMethod, typer.Option("--quant-method", help="Precision of the experts.")],
    input_type: Annotated[
        InputType, typer.Option("--input-type", help="Precision of the source's experts; checked if it is not auto.")
    ] = InputType.auto,
    cpuinfer_threads: Annotated[
        int | None, typer.Option("--cpuinfer-threads", min=1, help="Threads of the engine; recorded for it.")
    ] = None,
    threadpool_count: Annotated[
        int | None, typer.Option("--threadpool-count", min=1, help="NUMA nodes the engine will run on.  [default: 2]")
    ] = None,
    no_merge_safetensor: Annotated[
        bool, typer.Option("--no-merge-safetensor", help="Write .kt files in _layer_N/_numa_P folders.")
    ] = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    verify: Verify = False,
    print_pipeline: Annotated[
        bool, typer.Option("--print-pipeline", help="Print the pipeline file for these options and write nothing.")
    ] = False,
) -> None:
    """Convert a MoE checkpoint's experts to INT4 or INT8 for KTransformers, with upstream's options."""
    from ktforge.cli.running import carry_out
    from ktforge.config import build_pipeline, dump_pipeline
    from ktforge.registry import Registry

    preprocess: dict[str, Any] = {"use": "moe-to-bf16", "input_type": input_type.value}
    layout: dict[str, Any] = {"use": "kt-amx"}
    if threadpool_count is not None:
        layout["threadpool_count"] = threadpool_count
    data = {
        "loader": {"use": "auto", "path": str(input_path)},
        "preprocess": [preprocess],
        "quantize": {"use": quant_method.value},
        "layout": layout,
        "writer": {"use": "kt-folder" if no_merge_safetensor else "safetensors", "path": str(output)},
        "runtime": {"cpuinfer_threads": cpuinfer_threads},
    }
    registry = Registry.installed()
    pipeline = build_pipeline(data, registry, "convert")
    if print_pipeline:
        typer.echo(dump_pipeline(pipeline), nl=False)
    else:
        carry_out(pipeline, registry, overwrite=overwrite, restart=restart, verify=verify)
