"""Preprocessor ``fp8``: FP8 weights with scales for blocks, rows or the whole, MXFP8 among them, become BF16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from ktforge import Preprocessor, TensorSpec, Unsupported, hookimpl, native
from ktforge.contract.pending import Pending
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES, F8_E4M3
from ktforge.model.number_format import DOWNLOAD, NumberFormat, Stored
from ktforge_plugins.preprocess import integers, scales

F8_E5M2 = DTYPES["F8_E5M2"]


class Fp8(NumberFormat):
    """float8_e4m3fn or float8_e5m2 times its scale, in float32 and rounded once to BF16.

    Blocks are those of ``quantization_config.weight_block_size`` where they explain the scale's shape (DeepSeek, Qwen,
    MiniMax), otherwise the scale's own grid: one number a row (GLM, compressed-tensors), one for all (static FP8), or
    one for 32 columns (MXFP8). Scales are floats, or exponents as F8_E8M0 or U8.
    """

    name: ClassVar[str] = "fp8"
    rowwise: ClassVar[bool] = True

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        weight = parameters.get("weight")
        if weight is None or weight.dtype not in (F8_E4M3, F8_E5M2):
            return None
        found = scales.scale_of(parameters)
        if found is None:
            names = ", ".join(scales.NAMES)
            raise Unsupported(
                f"{weight.name} is FP8, but its scale ({names}) is missing from the checkpoint: {DOWNLOAD}"
            )
        if len(weight.shape) != 2:
            raise Unsupported(f"{weight} is FP8 but no matrix")
        scales.check_dtype(found[1], (*scales.FLOATS, *scales.EXPONENTS))
        shape = (weight.shape[0], weight.shape[1])
        scales.block_of(weight, shape, found[1], self._announced())
        return Stored(shape, frozenset(["weight", found[0]]))

    def pending(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> Pending | None:
        if not self.is_pending(parameters):
            return None
        weight, values, block = self._operands(arrays, parameters)
        return native.Fp8Blocks(weight, values, block)

    def is_pending(self, parameters: Mapping[str, TensorSpec]) -> bool:
        """Not for a subclass that dequantises in another way, which the fused kernel would pass by."""
        return type(self).dequantize is Fp8.dequantize and parameters["weight"].dtype == F8_E4M3

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        weight, values, block = self._operands(arrays, parameters)
        if weight.dtype == F8_E4M3:
            return native.fp8_to_bf16(weight, values, block)
        return scales.scaled(weight, values, block)

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        found, (rows, columns) = scales.scale_of(parameters), parameters["weight"].shape
        assert found is not None
        unscaled = 0 if parameters["weight"].dtype == F8_E4M3 else integers.scratch(rows, columns)
        return unscaled + scales.scratch(found[1])

    def _operands(
        self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """The FP8 weight, its scales in float32, and the block that each of them is for."""
        found = scales.scale_of(parameters)
        assert found is not None
        weight = np.ascontiguousarray(arrays["weight"])
        shape = (weight.shape[0], weight.shape[1])
        block = scales.block_of(parameters["weight"], shape, found[1], self._announced())
        return weight, scales.values_of(arrays[found[0]], shape, block), block

    def _announced(self) -> tuple[int, int] | None:
        block = self._quantization.get("weight_block_size")
        if block is None:
            return None
        if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
            return block[0], block[1]
        raise Unsupported(f"config.json: weight_block_size is {str(block)[:40]}; it must be [rows, columns]")


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Fp8]
