"""Preprocessor ``fp4``: 4-bit floats (E2M1) with scales of their own for 16 or 32 columns become BF16.

Source of MXFP4: OCP Microscaling Formats 1.0; of NVFP4: NVIDIA's Model Optimizer and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from ktforge import Preprocessor, TensorSpec, Unsupported, hookimpl, native
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES, F8_E4M3, F32
from ktforge.model.number_format import DOWNLOAD, NumberFormat, Stored
from ktforge_plugins.preprocess import scales

#: Two E2M1 numbers a byte, the lower half first.
BYTES = (DTYPES["U8"], DTYPES["I8"])
#: What the codes stand for; the highest bit is the sign.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
#: Columns that one scale is for.
MX, NV = 32, 16
#: gpt-oss keeps blocks of 16 bytes as an axis of their own.
BLOCK = 16


class Fp4(NumberFormat):
    """MXFP4 and NVFP4 under all their names become BF16: E2M1 times scale in float32, rounded once.

    ``weight_packed`` or ``weight`` [out, in / 2] with a scale of exponents (F8_E8M0 or U8) [out, in / 32] (DeepSeek-V4,
    compressed-tensors); ``blocks`` [out, in / 32, 16] with ``scales`` (gpt-oss); or with a scale of F8_E4M3
    [out, in / 16] and one float32 number, ``weight_global_scale`` that divides it (compressed-tensors) or
    ``weight_scale_2`` that multiplies it (Model Optimizer).
    """

    name: ClassVar[str] = "fp4"
    rowwise: ClassVar[bool] = True

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        if "blocks" in parameters:
            return _stored_blocks(parameters)
        carrier = "weight_packed" if "weight_packed" in parameters else "weight"
        codes = parameters.get(carrier)
        if codes is None or codes.dtype not in BYTES:
            return None
        found = scales.scale_of(parameters)
        if found is None or found[1].dtype not in (*scales.EXPONENTS, F8_E4M3):
            return None
        if len(codes.shape) != 2:
            raise Unsupported(f"{codes} is packed but no matrix")
        name, scale = found
        group = NV if scale.dtype == F8_E4M3 else MX
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        if columns % group or scale.shape != (rows, columns // group):
            raise Unsupported(f"{scale} is not one scale for {group} of the {columns} columns in {codes}")
        used = {carrier, name}
        if group == NV:
            used.add(_whole_scale(codes, parameters))
        return Stored((rows, columns), frozenset(used))

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        if "blocks" in arrays:
            codes, stored_scale = arrays["blocks"].reshape(len(arrays["blocks"]), -1), arrays["scales"]
        else:
            codes = arrays["weight_packed" if "weight_packed" in arrays else "weight"]
            stored_scale = next(arrays[n] for n in scales.NAMES if n in arrays)
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        group = columns // stored_scale.shape[1]
        scale = scales.values_of(stored_scale, (rows, columns), (1, group))
        if "weight_global_scale" in arrays:
            scale = scale / arrays["weight_global_scale"].reshape(())
        elif "weight_scale_2" in arrays:
            scale = scale * arrays["weight_scale_2"].reshape(())
        return native.nibbles_to_bf16(np.ascontiguousarray(codes).view(np.uint8), E2M1, scale, group)

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        found = scales.scale_of(parameters)
        return scales.scratch(parameters["scales"] if "blocks" in parameters or found is None else found[1])


def _stored_blocks(parameters: Mapping[str, TensorSpec]) -> Stored:
    blocks, scale = parameters["blocks"], parameters.get("scales")
    if scale is None:
        raise Unsupported(f"{blocks.name} is packed, but its scales are missing from the checkpoint: {DOWNLOAD}")
    if blocks.dtype not in BYTES or len(blocks.shape) != 3 or blocks.shape[2] != BLOCK:
        raise Unsupported(f"{blocks} is not bytes in blocks of {BLOCK}")
    scales.check_dtype(scale, scales.EXPONENTS)
    if scale.shape != blocks.shape[:2]:
        raise Unsupported(f"{scale} is not one scale a block of {blocks}")
    # Its model class multiplies from the other side: fused weights are [E, in, out] once they are not packed.
    return Stored((blocks.shape[0], blocks.shape[1] * MX), frozenset(["blocks", "scales"]), fused_transposed=True)


def _whole_scale(codes: TensorSpec, parameters: Mapping[str, TensorSpec]) -> str:
    """The parameter that scales a whole NVFP4 weight."""
    for name in ("weight_global_scale", "weight_scale_2"):
        if name in parameters:
            scale = parameters[name]
            if scale.dtype != F32 or scale.shape not in ((), (1,), (1, 1)):
                raise Unsupported(f"{scale} must be one F32 number")
            return name
    raise Unsupported(f"{codes.name} is NVFP4, but its weight_global_scale or weight_scale_2 is missing: {DOWNLOAD}")


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Fp4]
