from __future__ import annotations

import typer

from ktforge.cli.options import Block, PluginFiles, installed

NAME = "plugins"


def command(block: Block = None, plugins: PluginFiles = None) -> None:
    """List the stages: name, stage, distribution, version, and the plugin's name, which --block takes."""
    rows = [("name", "stage", "distribution", "version", "plugin")]
    for entry in installed(block, plugins).entries():
        rows.append((entry.cls.name, entry.cls.stage, entry.distribution or "-", entry.version or "-", entry.plugin))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
