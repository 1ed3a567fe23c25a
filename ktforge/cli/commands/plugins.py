from __future__ import annotations

import typer

from ktforge.cli.options import AsJson, Block, PluginFiles, installed
from ktforge.cli.table import show_json

NAME = "plugins"


def command(as_json: AsJson = False, block: Block = None, plugins: PluginFiles = None) -> None:
    """List the stages: name, stage, distribution, version, and the plugin's name, which --block takes."""
    head = ("name", "stage", "distribution", "version", "plugin")
    found = [
        (e.cls.name, e.cls.stage, e.distribution, e.version, e.plugin) for e in installed(block, plugins).entries()
    ]
    if as_json:
        show_json([dict(zip(head, values, strict=True)) for values in found])
        return
    rows = [head, *(tuple(value or "-" for value in values) for values in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
