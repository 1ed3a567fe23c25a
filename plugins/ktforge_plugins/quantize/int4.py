"""Quantizer ``int4``: 4-bit codes, one scale a row from its largest weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ktforge import Quantizer, hookimpl
from ktforge_plugins.quantize.absmax import AbsmaxQuantizer


class Int4(AbsmaxQuantizer):
    """Codes of 4 bits; see docs/formats/kt-amx.md for the rule."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [Int4]
