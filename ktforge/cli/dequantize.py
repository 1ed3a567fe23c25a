from __future__ import annotations

from ktforge.cli.options import (
    Block,
    InputPath,
    MemoryLimit,
    Output,
    Overwrite,
    PluginFiles,
    Restart,
    Verify,
    Workers,
    installed,
)

NAME = "dequantize"


def command(
    input_path: InputPath,
    output: Output,
    overwrite: Overwrite = False,
    restart: Restart = False,
    verify: Verify = False,
    workers: Workers = None,
    memory_limit: MemoryLimit = None,
    block: Block = None,
    plugins: PluginFiles = None,
) -> None:
    """Read a quantised output back and write an ordinary BF16 checkpoint."""
    from ktforge.cli.running import carry_out
    from ktforge.dequantize import dequantize_pipeline

    registry = installed(block, plugins)
    pipeline = dequantize_pipeline(input_path, output, registry)
    carry_out(
        pipeline, registry, overwrite=overwrite, restart=restart, verify=verify, workers=workers,
        memory_limit=memory_limit,
    )  # fmt: skip
