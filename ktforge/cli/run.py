from __future__ import annotations

from typing import Annotated

import typer

from ktforge.cli.options import Block, MemoryLimit, Overwrite, PipelineFile, PluginFiles, Sets, Workers, installed

NAME = "run"


def command(
    pipeline: PipelineFile,
    sets: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    overwrite: Overwrite = False,
    workers: Workers = None,
    memory_limit: MemoryLimit = None,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Run a pipeline file."""
    from ktforge.cli.plan import show
    from ktforge.cli.running import carry_out
    from ktforge.config import load_pipeline

    registry = installed(block, plugins)
    built = load_pipeline(pipeline, registry, sets or ())
    if dry_run:
        show(built.plan(), as_json=False)
    else:
        carry_out(built, registry, overwrite=overwrite, workers=workers, memory_limit=memory_limit)
