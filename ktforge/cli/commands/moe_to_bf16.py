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

NAME = "moe-to-bf16"


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
    """Convert a MoE checkpoint's experts to BF16 and write an ordinary Hugging Face checkpoint."""
    from ktforge.cli.progress import carry_out
    from ktforge.pipeline.file import build_pipeline
    from ktforge.pipeline.presets import to_bf16

    registry = installed(block, plugins)
    carry_out(build_pipeline(to_bf16(input_path, output, follow_links=follow_links), registry, NAME), registry, options)
