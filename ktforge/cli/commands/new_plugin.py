from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

NAME = "new-plugin"


class Kind(StrEnum):
    loader = "loader"
    preprocess = "preprocess"
    quantize = "quantize"
    layout = "layout"
    writer = "writer"
    observer = "observer"


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What follows use: in pipeline files, such as my-int3.")],
    kind: Annotated[
        Kind | None,
        typer.Option(
            "--kind",
            case_sensitive=False,
            help="What the package has.  [default: a quantizer and a layout that go together]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="The folder to write.  [default: ktforge-NAME]")
    ] = None,
) -> None:
    """Write the package of a plugin to start from, with its tests: a quantizer and a layout, or another kind."""
    from ktforge.contract.registry import Registry
    from ktforge.errors import ConfigError
    from ktforge.skeleton import write_skeleton
    from ktforge.text import printable

    taken = [e for e in Registry.installed().entries() if e.cls.name == name]
    if taken:
        raise ConfigError(f"there is a {taken[0].cls.stage} called {name!r} already ({taken[0]}): choose another name")
    folder = write_skeleton(name, output, kind and kind.value)
    typer.echo(printable(f"{folder}: next, pip install --editable {folder}, then ktforge plugins"))
