from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktforge.cli.options import AsJson, Block, FollowLinks, PluginFiles, installed
from ktforge.cli.table import show_json, show_rows

if TYPE_CHECKING:
    from ktforge.comparison.result import Comparison

NAME = "compare"


def command(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[ORIGINAL CONVERTED]", help="The two folders.", show_default=False)
    ] = None,
    original: Annotated[
        Path | None, typer.Option("--original", metavar="DIR", help="The checkpoint that was converted.")
    ] = None,
    converted: Annotated[
        Path | None, typer.Option("--converted", metavar="DIR", help="What was made of it, in any form.")
    ] = None,
    sample: Annotated[
        str, typer.Option("--sample", metavar="PERCENT", help="Look at so many of all tensors alone, such as 5%.")
    ] = "100%",
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error", metavar="ERROR", min=0, help="The largest relative error that is well, such as 0.2."
        ),
    ] = None,
    as_json: AsJson = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", min=1, help="Threads that compare.  [default: the cores this process may use]"
        ),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="SIZE", help="Most memory for the original, such as 2GB.")
    ] = None,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Compare a converted checkpoint with its original: whether it is whole, and how far its weights are off.

    Each may be in any form that can be read, such as BF16, FP8 or an output of ktforge. Exits with 1 if anything is
    wrong.
    """
    from ktforge.cli.progress import memory_bytes
    from ktforge.comparison.compare import compare

    one, other = _folders(folders or [], original, converted)
    found = compare(
        one, other, sample=_fraction(sample), max_error=max_error, workers=workers,
        memory_limit=memory_bytes(memory_limit), registry=installed(block, plugins),
        follow_links=follow_links,
    )  # fmt: skip
    if as_json:
        show_json(found.to_dict())
    else:
        show_rows([*_rows(found), *(("note", n) for n in found.notes), *(("wrong", p) for p in found.problems)])
    if not found.ok:
        raise typer.Exit(1)


def _folders(given: list[Path], original: Path | None, converted: Path | None) -> tuple[Path, Path]:
    if original is not None and converted is not None and not given:
        return original, converted
    if len(given) == 2 and original is None and converted is None:
        return given[0], given[1]
    raise typer.BadParameter("give two folders: --original DIR --converted DIR, or one behind the other")


def _fraction(text: str) -> float:
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise typer.BadParameter(f"--sample {text}: write it as 5%, or as a fraction such as 0.05")
    return number


def _rows(found: Comparison) -> list[tuple[str, str]]:
    from ktforge.text import counted

    rows = [("original", found.original), ("converted", found.converted)]
    if found.identical:
        rows.append(("weights", "what is stored is the same, byte for byte"))
    if found.experts:
        experts = {(t.layer, t.expert) for t in found.experts}
        layers = {t.layer for t in found.experts}
        sample = "" if found.sample == 1 else f", a sample of {100 * found.sample:g} %"
        rows.append(("experts", f"{counted(len(experts), 'expert')} in {counted(len(layers), 'layer')}{sample}"))
    for projection, m in found.projections.items():
        if not m.square:
            rows.append((projection, "equal"))
            continue
        measured = f"relative error {m.relative_error:.4f}, SQNR {m.sqnr:.2f} dB, cosine {m.cosine:.5f}"
        rows.append((projection, f"{measured}, largest error {m.largest:.3g}"))
    if (codes := found.codes) is not None:
        rows.append(
            (
                "codes",
                f"{100 * codes.zero / codes.codes:.3g} % are zero, {100 * codes.ends / codes.codes:.3g} % at the ends",
            )
        )
    for tensor in found.worst(3) if found.ok else ():
        if tensor.measures.relative_error:
            rows.append(("furthest", f"{tensor.name}: {tensor.measures.relative_error:.4f}"))
    if found.others:
        changed = [t for t in found.others if t.measures.square]
        most = max((t.measures.relative_error for t in changed), default=0.0)
        said = f", {len(changed):,} of them changed, by {most:.4f} at most" if changed else ", all unchanged"
        rows.append(("the rest", f"{counted(len(found.others), 'tensor')}{said}"))
    return rows
