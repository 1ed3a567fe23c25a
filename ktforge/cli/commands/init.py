from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktforge.cli.options import Block, Checkpoint, FollowLinks, PluginFiles, installed

NAME = "init"


def command(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file to write.  [default: stdout]")
    ] = None,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Print a commented pipeline file for a checkpoint, to begin with, or write it.

    If there is none for it, comments say why, and the exit code is 1; nothing is written then.
    """
    from ktforge.inspection.suggest import starter

    text = starter(checkpoint, installed(block, plugins), follow_links=follow_links)
    nothing = all(line.startswith("#") for line in text.splitlines())
    if output is None or nothing:
        typer.echo(text, nl=False)
    else:
        _write(output, text)
    if nothing:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    """Writes a new file. Raises ConfigError if there is one already, or none can be written."""
    from ktforge.errors import ConfigError
    from ktforge.text import printable

    try:
        path.open("xb").close()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:
            path.unlink()
            raise
    except FileExistsError:
        raise ConfigError(f"{path} exists already: choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    typer.echo(printable(f"{path}: next, ktforge plan {path}"))
