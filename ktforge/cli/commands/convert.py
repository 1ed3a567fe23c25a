from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktforge.cli.options import (
    Block,
    FollowLinks,
    InputPath,
    Output,
    PluginFiles,
    RunOptions,
    Sets,
    installed,
    takes_run_options,
)
from ktforge.cli.table import show_json
from ktforge.cli.upstream import check_method, remark
from ktforge.text import nearest

if TYPE_CHECKING:
    from ktforge.contract.presets import Option, Preset

NAME = "convert"


class InputType(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"
    auto = "auto"


class GateUp(StrEnum):
    auto = "auto"
    halves = "halves"
    interleaved = "interleaved"


class Scales(StrEnum):
    auto = "auto"
    absmax = "absmax"
    searched = "searched"
    calibrated = "calibrated"
    feedback = "feedback"


class ExpertOrder(StrEnum):
    auto = "auto"
    out_in = "out-in"
    in_out = "in-out"


@takes_run_options
def command(
    input_path: InputPath,
    output: Output,
    quant_method: Annotated[
        str,
        typer.Option(
            "--quant-method",
            metavar="NAME",
            help="int4, int8, rawint4 (int4 in groups of 32, codes -7 to 7), or what a plugin offers.",
        ),
    ] = "int4",
    input_type: Annotated[
        InputType,
        typer.Option(
            "--input-type", case_sensitive=False, help="Precision of the source's experts; checked if it is not auto."
        ),
    ] = InputType.auto,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="NAME",
            help="What reads the output, where a method has several, such as compressed-tensors.  "
            "[default: kt-amx; compressed-tensors for rawint4]",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", min=1, help="Columns that share a scale.  [default: a whole row]"),
    ] = None,
    scales: Annotated[
        Scales | None,
        typer.Option(
            "--scales",
            case_sensitive=False,
            help="What decides a scale of INT4: the largest weight (absmax, upstream's bytes), a search, or one that "
            "knows the inputs.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="FILE", help="What flows into the experts: by ktforge calibrate, or an imatrix."
        ),
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
    follow_links: FollowLinks = False,
    gate_up: Annotated[
        GateUp,
        typer.Option("--gate-up", case_sensitive=False, help="How fused experts keep gate and up in one tensor."),
    ] = GateUp.auto,
    expert_order: Annotated[
        ExpertOrder,
        typer.Option(
            "--expert-order", case_sensitive=False, help="Axes of fused experts' matrices, outputs or inputs first."
        ),
    ] = ExpertOrder.auto,
    resume_layer: Annotated[
        int | None, typer.Option("--resume-layer", metavar="N", help="Upstream's; not needed, and says so.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Upstream's; not needed, and says so.")] = False,
    fp8_expert_batch: Annotated[
        int | None, typer.Option("--fp8-expert-batch", metavar="N", help="Upstream's; not needed, and says so.")
    ] = None,
    sets: Sets = None,
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
    from ktforge.pipeline.presets import convert

    remark({"resume_layer": resume_layer, "gpu": gpu, "fp8_expert_batch": fp8_expert_batch})
    registry = installed(block, plugins)
    preset = _preset(registry.presets(), quant_method, layout)
    options_of_presets: dict[Option, Any] = {
        "group_size": group_size, "threadpool_count": threadpool_count, "no_merge_safetensor": no_merge_safetensor,
        "scales": scales.value if scales else None,
        "calibration": str(calibration) if calibration else None,
    }  # fmt: skip
    given = {option: value for option, value in options_of_presets.items() if value}
    for option in given:
        if option not in preset.options:
            takers = ", ".join(f"`{p.command}`" for p in registry.presets() if option in p.options)
            flag = "--" + option.replace("_", "-")
            raise typer.BadParameter(f"{flag} does not go with `{preset.command}`: leave it out; it is for {takers}")
    data = convert(
        input_path, output, preset, given=given, input_type=input_type.value, cpuinfer_threads=cpuinfer_threads,
        follow_links=follow_links, fused={"gate_up": gate_up.value, "order": expert_order.value},
    )  # fmt: skip
    pipeline = build_pipeline(data, registry, NAME, sets or ())
    if print_pipeline and options.as_json:
        show_json(pipeline.to_dict())
    elif print_pipeline:
        typer.echo(dump_pipeline(pipeline), nl=False)
    else:
        carry_out(pipeline, registry, options)


def _preset(presets: Sequence[Preset], method: str, layout: str | None) -> Preset:
    """The preset that these words mean. Raises BadParameter with those there are."""
    named = [p for p in presets if p.name.lower() == method.lower()]
    if not named:
        check_method(method)
        known = list(dict.fromkeys(p.name for p in presets))
        raise typer.BadParameter(
            f"there is no --quant-method {method}{nearest(method.lower(), known)}; there are {', '.join(known)}"
        )
    found = [p for p in named if (layout.lower() == p.layout["use"].lower() if layout else not p.with_layout)]
    if not found:
        layouts = [str(p.layout["use"]) for p in named]
        mend = f"say --layout {layouts[0]}" if named[0].with_layout else "leave --layout out"
        hint = nearest(layout.lower(), layouts) if layout else ""
        raise typer.BadParameter(f"{method} is for the layout {' or '.join(layouts)}{hint}: {mend}")
    return found[0]
