from __future__ import annotations

import typer

from ktforge.cli.options import Checkpoint

NAME = "init"


def command(checkpoint: Checkpoint) -> None:
    """Print a commented pipeline file for a checkpoint, to begin with."""
    from ktforge.inspection import starter
    from ktforge.registry import Registry

    typer.echo(starter(checkpoint, Registry.installed()), nl=False)
