"""What people type for KTransformers' own converter: options that ktforge has no need of, and methods that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from ktforge.cli.options import logger

#: Option → why it changes nothing.
_NOT_NEEDED = {
    "resume_layer": "the same command goes on where it stopped, by itself",
    "gpu": "weights are quantised on the CPU, about as fast as the disk is",
    "fp8_expert_batch": "experts are worked on one by one, as many at once as --workers and --memory-limit allow",
}
#: Method → what it is for, and what to say instead.
_INSTEAD = {
    "awq": "checkpoints in AWQ are read as such, by their config.json: say --quant-method int4, or rawint4",
    "moe_int4": "its backend reads files that ktforge does not write: say int4 for CPUs with AVX-512 or AMX, "
    "rawint4 for those with AVX2",
    "moe_int8": "its backend reads files that ktforge does not write: say int8 for CPUs with AVX-512 or AMX, "
    "rawint4 for those with AVX2",
}


def remark(given: Mapping[str, Any]) -> None:
    """Says of each option that was given, by its parameter's name, why it is not needed."""
    for name, value in given.items():
        if value not in (None, False):
            logger.warning("--%s is not needed: %s", name.replace("_", "-"), _NOT_NEEDED[name])


def check_method(method: str) -> None:
    """Raises BadParameter for a method of upstream's alone, with what to say instead."""
    if instead := _INSTEAD.get(method.lower()):
        raise typer.BadParameter(f"ktforge has no --quant-method {method}: {instead}")
