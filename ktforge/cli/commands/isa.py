from __future__ import annotations

import typer

NAME = "isa"


def command() -> None:
    """Show the instruction sets of this build, and which one is in use (KTFORGE_ISA forces one)."""
    from ktforge import native

    current = native.current_isa()
    for name, supported in native.isas().items():
        state = "in use" if name == current else "available" if supported else "not on this CPU"
        typer.echo(f"{name:<8} {state}")
