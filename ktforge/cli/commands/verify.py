from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktforge.cli.options import AsJson, Block, FollowLinks, PluginFiles, installed
from ktforge.cli.table import show_json, show_rows

NAME = "verify"


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the output.")],
    as_json: AsJson = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="N", min=1, help="Threads that read.  [default: the cores this process may use]"
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Read from the disk itself, not what the system keeps of it in memory.")
    ] = False,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Look at an output by itself, without its source: files, hashes, structure, scales and codes.

    Reads everything once. Exits with 1 if anything is wrong.
    """
    from ktforge.verification.verify import verify

    found = verify(folder, workers=workers, registry=installed(block, plugins), follow_links=follow_links, cold=cold)
    if as_json:
        show_json(found.to_dict())
    else:
        rows = [(c.name, f"{'wrong' if c.problems else 'good'}: {c.looked_at}") for c in found.checks]
        show_rows([*rows, *(("note", n) for n in found.notes), *(("wrong", p) for p in found.problems)])
    if not found.ok:
        raise typer.Exit(1)
