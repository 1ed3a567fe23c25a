"""Quantizer ``int8``: 8-bit codes, one scale a row or a group of columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ktforge import Quantizer, hookimpl
from ktforge.contract.stages import PlanKey, alike
from ktforge_plugins.quantize.integer import IntegerQuantizer


class Int8(IntegerQuantizer):
    """Codes of 8 bits."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    trusted: ClassVar[bool] = True

    def plan_key(self) -> PlanKey:
        return alike


@hookimpl
def ktforge_quantizers() -> Iterable[type[Quantizer]]:
    return [Int8]
