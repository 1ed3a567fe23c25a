from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktforge.cli.hf import Activations, Context, Kernels, MemoryLimit, Texts, TrustRemoteCode, Workers
from ktforge.cli.options import AsJson, Block, FollowLinks, PluginFiles, installed
from ktforge.cli.table import show_columns, show_json

if TYPE_CHECKING:
    from ktforge.hf.result import Evaluation, Score

NAME = "eval"
#: Layers that the table names, those that hurt most.
WORST = 5


def command(
    original: Annotated[Path, typer.Option("--original", metavar="DIR", help="The checkpoint that was converted.")],
    converted: Annotated[
        list[Path], typer.Option("--converted", metavar="DIR", help="What was made of it; can be given several times.")
    ],
    texts: Texts = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=16, help="Read so many tokens of the text.")
    ] = 20_000,
    context: Context = 512,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", metavar="LIST", help="Take the converted experts of these layers alone, such as 0-9,29."
        ),
    ] = None,
    keep: Annotated[
        int,
        typer.Option("--keep", metavar="N", min=0, help="Measure, too, what it gains to keep the N worst layers."),
    ] = 0,
    activations: Activations = "exact",
    kernels: Kernels = None,
    memory_limit: MemoryLimit = "8GB",
    as_json: AsJson = False,
    workers: Workers = None,
    trust_remote_code: TrustRemoteCode = False,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Measure what a conversion did to what the model says: perplexity, divergence, first choice, and where it hurts.

    Original and converted compute in step, a layer in memory at a time. Without --text, a sample that comes with
    ktforge is read. Needs the extra ktforge[hf].
    """
    from ktforge.cli.hf import keep_stdout, layers_counted
    from ktforge.cli.progress import size_of
    from ktforge.hf.evaluation import evaluate

    chosen = numbers(layers) if layers is not None else None
    if kernels:
        keep_stdout()
    limit = size_of("--memory-limit", memory_limit)
    with layers_counted("evaluating") as progress:
        found = evaluate(
            original, converted, texts=texts or (), tokens=tokens, context=context, layers=chosen, keep=keep,
            activations=activations, kernels=kernels, memory_limit=limit, workers=workers,
            registry=installed(block, plugins), follow_links=follow_links, progress=progress,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if as_json:
        show_json(found.to_dict())
    else:
        _show(found)


def numbers(text: str) -> list[int]:
    """The numbers of ``0-9,29``. Raises BadParameter for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise typer.BadParameter(f"--layers {text}: write numbers and ranges, such as 0-9,29")
        if int(last or first) > 100_000:
            raise typer.BadParameter(f"--layers {text}: there is no such layer")
        found.update(range(int(first), int(last or first) + 1))
    return sorted(found)


def _show(found: Evaluation) -> None:
    rows: list[Sequence[str]] = [("", "perplexity", "divergence", "of 99 %", "same first choice")]
    rows.append((found.original, str(found.perplexity), "", "", ""))
    for score in found.scores:
        rows.append((score.folder, *_figures(score)))
    for gain in found.gains:
        rows.append((f"  layers {', '.join(map(str, gain.kept))} kept", *_figures(gain.score)))
    show_columns(rows)
    typer.echo(f"\n{found.tokens:,} tokens; figures ± one standard error; divergence in nats from the original")
    for number, score in enumerate(found.scores):
        typer.echo(f"\n{score.folder}: layers that hurt most (error of their output over the residual stream)")
        show_columns(
            [
                (f"  layer {d.layer}", f"{d.figures[number].value:.3g}", f"{found.share(number, d):.0%} of all layers'")
                for d in found.worst(number, WORST)
            ]
        )
    if not found.gains and len(found.layers) > 1:
        typer.echo("\nKeep their experts on the GPU, unquantised; --keep 2 measures what that gains.")


def _figures(score: Score) -> tuple[str, str, str, str]:
    return str(score.perplexity), str(score.divergence), str(score.divergence_99), str(score.agreement)
