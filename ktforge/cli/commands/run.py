from __future__ import annotations

from ktforge.cli.options import Block, PipelineFile, PluginFiles, RunOptions, Sets, installed, takes_run_options

NAME = "run"


@takes_run_options
def command(
    pipeline: PipelineFile,
    sets: Sets = None,
    block: Block = None,
    plugins: PluginFiles = None,
    *,
    options: RunOptions,
) -> None:
    """Run a pipeline file, or go on where an earlier run of it stopped."""
    from ktforge.cli.progress import carry_out
    from ktforge.pipeline.file import load_pipeline

    registry = installed(block, plugins)
    carry_out(load_pipeline(pipeline, registry, sets or ()), registry, options)
