from __future__ import annotations

from ktforge.cli.options import (
    Block,
    FollowLinks,
    InputPath,
    Output,
    PluginFiles,
    RunOptions,
    installed,
    takes_run_options,
)

NAME = "dequantize"


@takes_run_options
def command(
    input_path: InputPath,
    output: Output,
    follow_links: FollowLinks = False,
    block: Block = None,
    plugins: PluginFiles = None,
    *,
    options: RunOptions,
) -> None:
    """Read a quantised output back and write an ordinary BF16 checkpoint."""
    from ktforge.cli.progress import carry_out
    from ktforge.pipeline.presets import dequantize_pipeline

    registry = installed(block, plugins)
    pipeline = dequantize_pipeline(input_path, output, registry, follow_links=follow_links)
    carry_out(pipeline, registry, options)
