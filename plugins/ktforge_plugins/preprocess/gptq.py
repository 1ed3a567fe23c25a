"""Preprocessor ``gptq``: GPTQ's qweight, qzeros, scales and g_idx become BF16.

Source of the format: https://github.com/AutoGPTQ/AutoGPTQ (auto_gptq/nn_modules/qlinear) and
https://github.com/ModelCloud/GPTQModel for its second version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ktforge import CheckpointError, Preprocessor, TensorSpec, Unsupported, hookimpl
from ktforge.stages import PlanKey, alike
from ktforge.tensors import DTYPES
from ktforge_plugins.preprocess import integers, scales
from ktforge_plugins.preprocess.number_format import NumberFormat, Stored

I32 = DTYPES["I32"]
PARAMETERS = ("qweight", "qzeros", "scales")


class Gptq(NumberFormat):
    """2, 4 or 8 bits, symmetric or not, any group size, with or without an order of columns (desc_act).

    qweight int32 [in * bits / 32, out] packs along the inputs, qzeros int32 [groups, out * bits / 32] along the
    outputs, scales [groups, out]. value = (code - zero) * scale in float32, rounded once to BF16. ``checkpoint_format``
    gptq, the first version and the default, stores zero - 1, in as many bits; gptq_v2 the zero itself.
    """

    name: ClassVar[str] = "gptq"

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        qweight, scale = parameters.get("qweight"), parameters.get("scales")
        if qweight is None or qweight.dtype != I32:
            return None
        if not _is_gptq(qweight, scale, self._quantization.get("quant_method")):
            return None
        problems = list(self._problems(parameters))
        if problems:
            raise Unsupported(*problems)
        names = frozenset([*PARAMETERS, "g_idx"] & parameters.keys())
        return Stored((qweight.shape[1], qweight.shape[0] * 32 // self._bits(qweight)), names)

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        bits = self._bits(parameters["qweight"])
        codes = integers.unpacked_rows(arrays["qweight"], bits)  # [in, out]
        zeros = integers.unpacked(arrays["qzeros"], bits)  # [groups, out]
        if self._first_version():
            zeros = zeros + np.uint8(1) & np.uint8((1 << bits) - 1)
        groups, columns = zeros.shape[0], codes.shape[0]
        group_of = arrays.get("g_idx", np.arange(columns) // -(-columns // groups))
        if group_of.min(initial=0) < 0 or group_of.max(initial=0) >= groups:
            spec = parameters["g_idx"]
            raise CheckpointError(
                f"{spec.file or 'the checkpoint'}: {spec.name} points to a group outside the {groups}"
            )
        return integers.affine_by_input(codes, zeros, arrays["scales"].astype(np.float32), group_of)

    def _bits(self, qweight: TensorSpec) -> int:
        bits = self._quantization.get("bits")
        if bits not in (2, 4, 8):
            raise Unsupported(
                f"{qweight.name} has {bits or 'unknown'} bits by config.json; {self.name} reads 2, 4 and 8"
            )
        return int(bits)

    def _first_version(self) -> bool:
        return self._quantization.get("checkpoint_format", "gptq") != "gptq_v2"

    def _problems(self, parameters: Mapping[str, TensorSpec]) -> Iterator[str]:
        qweight = parameters["qweight"]
        missing = [p for p in PARAMETERS if p not in parameters]
        if missing:
            yield f"{qweight.name} is packed, but {' and '.join(missing)} are missing from the checkpoint"
            return
        form = self._quantization.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            yield f"{qweight.name} is of checkpoint_format {form!r}; {self.name} reads gptq and gptq_v2"
        bits = self._bits(qweight)
        columns, rows = qweight.shape[0] * 32 // bits, qweight.shape[1]
        scale, zeros, order = parameters["scales"], parameters["qzeros"], parameters.get("g_idx")
        scales.check_dtype(scale, scales.FLOATS)
        if len(scale.shape) != 2 or scale.shape[1] != rows or not 0 < scale.shape[0] <= columns:
            yield f"{scale} does not fit {qweight}"
        elif zeros.dtype != I32 or zeros.shape != (scale.shape[0], rows * bits // 32):
            yield f"{zeros} does not fit {scale} in {bits} bits"
        elif order is None and columns % scale.shape[0]:
            yield f"{scale} does not divide {columns} columns into groups, and there is no g_idx"
        if order is not None and (order.dtype.kind != "i" or order.shape != (columns,)):
            yield f"{order} must be integers [{columns}]"


def _is_gptq(qweight: TensorSpec, scale: TensorSpec | None, method: object) -> bool:
    """By shapes: the outputs are whole here and packed in AWQ. Without usable ones, config.json's word counts."""
    if scale is not None and len(scale.shape) == 2 and len(qweight.shape) == 2:
        return qweight.shape[1] == scale.shape[1]
    return method != "awq" and len(qweight.shape) == 2


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Gptq]
