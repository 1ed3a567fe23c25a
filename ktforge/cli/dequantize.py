from __future__ import annotations

from ktforge.cli.options import InputPath, MemoryLimit, Output, Overwrite, Workers

NAME = "dequantize"


def command(
    input_path: InputPath,
    output: Output,
    overwrite: Overwrite = False,
    workers: Workers = None,
    memory_limit: MemoryLimit = None,
) -> None:
    """Read a quantised output back and write an ordinary BF16 checkpoint."""
    from ktforge.cli.running import carry_out
    from ktforge.dequantize import dequantize_pipeline
    from ktforge.registry import Registry

    registry = Registry.installed()
    pipeline = dequantize_pipeline(input_path, output, registry)
    carry_out(pipeline, registry, overwrite=overwrite, workers=workers, memory_limit=memory_limit)
