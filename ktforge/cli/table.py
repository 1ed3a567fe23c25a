"""How commands show what they know: a label and what goes with it, one line each, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer


def show_json(data: Any) -> None:
    """Prints one JSON document."""
    typer.echo(json.dumps(data, indent=2))


def show_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints the rows, the labels as wide as the widest of them."""
    from ktforge.text import printable

    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {printable(value)}")


def show_columns(rows: Sequence[Sequence[str]]) -> None:
    """Prints the rows with each column as wide as the widest of it."""
    from ktforge.text import printable

    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
