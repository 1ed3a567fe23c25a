from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from ktforge.cli.options import Block, InputPath, Output, PluginFiles, RunOptions, installed, takes_run_options

NAME = "convert"


class InputType(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    auto = "auto"


class QuantMethod(StrEnum):
    int4 = "int4"
    int8 = "int8"
    rawint4 = "rawint4"


class LayoutName(StrEnum):
    kt_amx = "kt-amx"
    compressed_tensors = "compressed-tensors"


@takes_run_options
def command(
    input_path: InputPath,
    output: Output,
    quant_method: Annotated[
        QuantMethod, typer.Option("--quant-method", help="int4, int8, or rawint4: int4 in groups of 32, codes -7 to 7.")
    ],
    input_type: Annotated[
        InputType, typer.Option("--input-type", help="Precision of the source's experts; checked if it is not auto.")
    ] = InputType.auto,
    layout: Annotated[
        LayoutName | None,
        typer.Option("--layout", help="What reads the output.  [default: kt-amx; compressed-tensors for rawint4]"),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=1, help="Columns that share a scale.  [default: a whole row]")
    ] = None,
    cpuinfer_threads: Annotated[
        int | None,
        typer.Option("--cpuinfer-threads", metavar="N", min=1, help="Threads of the engine; recorded for it."),
    ] = None,
    threadpool_count: Annotated[
        int | None,
        typer.Option("--threadpool-count", metavar="N", min=1, help="NUMA nodes the engine will run on.  [default: 2]"),
    ] = None,
    no_merge_safetensor: Annotated[
        bool, typer.Option("--no-merge-safetensor", help="Write .kt files in _layer_N/_numa_P folders.")
    ] = False,
    block: Block = None,
    plugins: PluginFiles = None,
    print_pipeline: Annotated[
        bool, typer.Option("--print-pipeline", help="Print the pipeline file for these options and write nothing.")
    ] = False,
    *,
    options: RunOptions,
) -> None:
    """Convert a checkpoint to INT4 or INT8 for KTransformers, with upstream's options."""
    from ktforge.cli.progress import carry_out
    from ktforge.pipeline.file import build_pipeline, dump_pipeline
    from ktforge.pipeline.presets import RAWINT4, RAWINT4_GROUP, convert

    raw = quant_method is QuantMethod.rawint4
    if raw and layout is LayoutName.kt_amx:
        raise typer.BadParameter("rawint4 is for the layout compressed-tensors: leave --layout away, or say int4")
    if raw and group_size not in (None, RAWINT4_GROUP):
        raise typer.BadParameter(
            f"rawint4 has groups of {RAWINT4_GROUP}: leave --group-size away, or say int4 with --layout "
            "compressed-tensors"
        )
    chosen = layout or (LayoutName.compressed_tensors if raw else LayoutName.kt_amx)
    if chosen is LayoutName.kt_amx and group_size is not None:
        raise typer.BadParameter(
            "--group-size is for compressed-tensors; kt-amx has one scale a row: leave it away, or add "
            "--layout compressed-tensors"
        )
    if chosen is not LayoutName.kt_amx and threadpool_count is not None:
        raise typer.BadParameter(
            f"--threadpool-count is for kt-amx; {chosen.value} has one file for any number of nodes"
        )
    if chosen is not LayoutName.kt_amx and no_merge_safetensor:
        raise typer.BadParameter(f"--no-merge-safetensor is for kt-amx; {chosen.value} is always safetensors")
    data = convert(
        input_path, output, threadpool_count=threadpool_count, input_type=input_type.value,
        writer="kt-folder" if no_merge_safetensor else "safetensors", cpuinfer_threads=cpuinfer_threads,
        **(RAWINT4 if raw else {"quantize": quant_method.value, "layout": chosen.value, "group_size": group_size}),
    )  # fmt: skip
    registry = installed(block, plugins)
    pipeline = build_pipeline(data, registry, NAME)
    if print_pipeline:
        typer.echo(dump_pipeline(pipeline), nl=False)
    else:
        carry_out(pipeline, registry, options)
