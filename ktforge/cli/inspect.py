from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ktforge.cli.options import Block, Checkpoint, PluginFiles, installed

if TYPE_CHECKING:
    from ktforge.inspection import Inspection

NAME = "inspect"


def command(
    checkpoint: Checkpoint,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Show what a checkpoint is, what can be made of it and what is wrong with it, from headers alone."""
    from ktforge.inspection import inspect

    seen = inspect(checkpoint, installed(block, plugins))
    if as_json:
        typer.echo(json.dumps(seen.to_dict(), indent=2))
        return
    rows = _rows(seen)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


def _rows(seen: Inspection) -> list[tuple[str, str]]:
    from ktforge.cli.running import gigabytes

    rows = [
        ("model", f"{seen.model_type or 'unknown type'}, {seen.layers} layers, {len(seen.moe_layers)} with experts"),
        ("experts", f"{seen.experts} of {seen.expert_size} x {seen.hidden_size}{', fused' if seen.fused else ''}"),
        ("stored as", f"{', '.join(seen.expert_storage)}; {gigabytes(seen.expert_bytes)}"),
        ("the rest", f"{', '.join(seen.other_storage)}; {gigabytes(seen.other_bytes)}"),
    ]
    if seen.quantization:
        rows.append(("quantised", ", ".join(f"{k} {v}" for k, v in seen.quantization.items())))
    if seen.mtp_bytes:
        rows.append(("mtp", f"multi-token-prediction layers, {gigabytes(seen.mtp_bytes)}"))
    rows.append(("files", f"{len(seen.files):,} with {seen.tensors:,} tensors"))
    if seen.not_read:
        rows.append(("not read", ", ".join(seen.not_read)))
    for target, reasons in seen.targets.items():
        rows += (
            [(target, reason) for reason in reasons] if reasons else [(target, "see wrong" if seen.problems else "yes")]
        )
    return [*rows, *(("wrong", problem) for problem in seen.problems)]
