"""Quantizer ``int8``: 8-bit codes, one scale a row from its largest weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ktforge import Quantizer, hookimpl
from ktforge_plugins.quantize.absmax import AbsmaxQuantizer


class Int8(AbsmaxQuantizer):
    """Codes of 8 bits; see docs/formats/kt-amx.md for the rule."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [Int8]
