from __future__ import annotations

import json

import typer

NAME = "schema"


def command() -> None:
    """Print the JSON schema of pipeline files with the installed plugins, for editors."""
    from ktforge.config import json_schema
    from ktforge.registry import Registry

    typer.echo(json.dumps(json_schema(Registry.installed()), indent=2))
