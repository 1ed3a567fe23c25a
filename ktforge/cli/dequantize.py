from __future__ import annotations

from ktforge.cli.options import InputPath, Output, Overwrite

NAME = "dequantize"


def command(input_path: InputPath, output: Output, overwrite: Overwrite = False) -> None:
    """Read a quantised output back and write an ordinary BF16 checkpoint."""
    from ktforge.cli.running import carry_out
    from ktforge.dequantize import dequantize_pipeline
    from ktforge.registry import Registry

    registry = Registry.installed()
    carry_out(dequantize_pipeline(input_path, output, registry), registry, overwrite=overwrite)
