from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ktforge.cli.options import AsJson, Block, Checkpoint, FollowLinks, PluginFiles, installed
from ktforge.cli.table import show_json, show_rows

if TYPE_CHECKING:
    from ktforge.inspection.description import Inspection

NAME = "inspect"


def command(
    checkpoint: Checkpoint,
    as_json: AsJson = False,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Show what a checkpoint is, what can be made of it and what is wrong with it.

    That is from headers alone, but for a sample of the codes of packed weights.

    Exits with 1 if something is wrong with it or nothing can be made of it, after what was found; of one that cannot be
    read at all, such as without a shard, it says why.
    """
    from ktforge.inspection.description import describe
    from ktforge.inspection.look import Look

    seen = describe(Look.at(checkpoint, installed(block, plugins), follow_links=follow_links))
    if as_json:
        show_json(seen.to_dict())
    else:
        show_rows([*_rows(seen), *_targets(seen), *(("wrong", problem) for problem in seen.problems)])
    if not seen.usable:
        raise typer.Exit(1)


def _rows(seen: Inspection) -> list[tuple[str, str]]:
    from ktforge.text import counted, size_text

    model = f"{seen.model_type or 'unknown type'}, {counted(seen.layers, 'layer')}"
    rows = [("model", f"{model}, {len(seen.moe_layers)} with experts" if seen.experts else f"{model}, dense")]
    if seen.packed:
        nodes = f" for {counted(seen.numa_nodes, 'NUMA node')}" if seen.numa_nodes else ""
        rows.append(("packed", f"{seen.packed}{nodes}"))
    if seen.made_from:
        rows.append(("made from", seen.made_from))
    if seen.experts:
        rows.append(("experts", f"{seen.experts} of {seen.expert_size} x {seen.hidden_size}{', fused' * seen.fused}"))
    for label, storage, size in (
        ("stored as", seen.expert_storage, seen.expert_bytes),
        ("the rest" if seen.experts else "stored as", seen.other_storage, seen.other_bytes),
    ):
        if storage:
            rows.append((label, f"{', '.join(storage)}; {size_text(size)}"))
    if seen.quantization:
        rows.append(("quantised", ", ".join(f"{k} {v}" for k, v in seen.quantization.items())))
    rows += [("note", remark) for remark in seen.remarks]
    if seen.mtp_bytes:
        rows.append(("mtp", f"multi-token-prediction layers, {size_text(seen.mtp_bytes)}"))
    rows.append(("files", f"{len(seen.files):,} with {counted(seen.tensors, 'tensor')}"))
    if seen.not_read:
        rows.append(("not read", ", ".join(seen.not_read)))
    if seen.replacement:
        rows.append(
            (
                "unfinished",
                f"a run that would replace it ({seen.replacement}): the same command goes on, --restart begins anew",
            )
        )
    return rows


def _targets(seen: Inspection) -> list[tuple[str, str]]:
    """A line for each reason; one that goes for the target before too is not said again."""
    rows = []
    before: tuple[str, ...] = ()
    for target, reasons in seen.targets.items():
        if reasons:
            said = ["as above"] if reasons == before else reasons
            rows += [(target, f"no: {reason}") for reason in said]
        else:
            rows.append((target, "no: see wrong" if seen.problems else "yes"))
        before = reasons
    return rows
