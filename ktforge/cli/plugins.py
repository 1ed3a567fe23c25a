from __future__ import annotations

NAME = "plugins"


def command() -> None:
    """List the installed stages: name, stage, distribution, version."""
    from rich.console import Console
    from rich.table import Table

    from ktforge.registry import Registry

    table = Table("name", "stage", "distribution", "version", box=None, pad_edge=False)
    for entry in Registry.installed().entries():
        table.add_row(entry.cls.name, entry.cls.stage, entry.distribution, entry.version)
    Console(soft_wrap=True).print(table)
