from __future__ import annotations

import json

import typer

from ktforge.cli.options import Block, PluginFiles, installed

NAME = "schema"


def command(block: Block = None, plugins: PluginFiles = None) -> None:
    """Print the JSON schema of pipeline files with the installed plugins, for editors."""
    from ktforge.pipeline.schema import json_schema

    typer.echo(json.dumps(json_schema(installed(block, plugins)), indent=2))
