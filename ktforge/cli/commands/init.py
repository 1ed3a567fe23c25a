from __future__ import annotations

import typer

from ktforge.cli.options import Block, Checkpoint, FollowLinks, PluginFiles, installed

NAME = "init"


def command(
    checkpoint: Checkpoint, follow_links: FollowLinks = False, block: Block = None, plugins: PluginFiles = None
) -> None:
    """Print a commented pipeline file for a checkpoint, to begin with.

    If there is none for it, comments say why, and the exit code is 1.
    """
    from ktforge.inspection.suggest import starter

    text = starter(checkpoint, installed(block, plugins), follow_links=follow_links)
    typer.echo(text, nl=False)
    if all(line.startswith("#") for line in text.splitlines()):
        raise typer.Exit(1)
