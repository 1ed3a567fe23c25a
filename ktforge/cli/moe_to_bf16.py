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

NAME = "moe-to-bf16"


def command(
    input_path: InputPath,
    output: Output,
    overwrite: Overwrite = False,
    workers: Workers = None,
    memory_limit: MemoryLimit = None,
    block: Block = None,
    plugins: PluginFiles = None,
    restart: Restart = False,
    verify: Verify = False,
) -> None:
    """Convert a MoE checkpoint's experts to BF16 and write an ordinary Hugging Face checkpoint."""
    from ktforge.cli.running import carry_out
    from ktforge.config import build_pipeline

    registry = installed(block, plugins)
    data = {
        "loader": {"use": "auto", "path": str(input_path)},
        "preprocess": [{"use": "moe-to-bf16"}],
        "writer": {"use": "safetensors", "path": str(output)},
    }
    pipeline = build_pipeline(data, registry, NAME)
    carry_out(
        pipeline, registry, overwrite=overwrite, restart=restart, verify=verify, workers=workers,
        memory_limit=memory_limit,
    )  # fmt: skip
