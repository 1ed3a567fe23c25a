from __future__ import annotations

from ktforge.cli.options import AsJson, Block, PipelineFile, PluginFiles, Sets, installed

NAME = "plan"


def command(
    pipeline: PipelineFile, sets: Sets = None, as_json: AsJson = False, block: Block = None, plugins: PluginFiles = None
) -> None:
    """Show what a pipeline file would do, and everything that speaks against it, from headers alone."""
    from ktforge.cli.plans import show
    from ktforge.pipeline.file import load_pipeline

    registry = installed(block, plugins)
    show(load_pipeline(pipeline, registry, sets or ()).plan(registry), as_json=as_json)
