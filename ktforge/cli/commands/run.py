from __future__ import annotations

from typing import Annotated

import typer

from ktforge.cli.options import Block, PipelineFile, PluginFiles, RunOptions, Sets, installed, takes_run_options

NAME = "run"


@takes_run_options
def command(
    pipeline: PipelineFile,
    sets: Sets = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    block: Block = None,
    plugins: PluginFiles = None,
    *,
    options: RunOptions,
) -> None:
    """Run a pipeline file, or go on where an earlier run of it stopped."""
    from ktforge.cli.commands.plan import show
    from ktforge.cli.progress import carry_out, memory_bytes
    from ktforge.pipeline.file import load_pipeline

    registry = installed(block, plugins)
    built = load_pipeline(pipeline, registry, sets or ())
    if dry_run:
        limit = memory_bytes(options.memory_limit)
        show(built.plan(registry), as_json=False, workers=options.workers, memory_limit=limit)
    else:
        carry_out(built, registry, options)
