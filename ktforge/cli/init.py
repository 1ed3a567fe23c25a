from __future__ import annotations

import typer

from ktforge.cli.options import Block, Checkpoint, PluginFiles, installed

NAME = "init"


def command(checkpoint: Checkpoint, block: Block = None, plugins: PluginFiles = None) -> None:
    """Print a commented pipeline file for a checkpoint, to begin with."""
    from ktforge.starter import starter

    typer.echo(starter(checkpoint, installed(block, plugins)), nl=False)
