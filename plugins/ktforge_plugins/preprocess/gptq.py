"""Preprocessor ``gptq``: GPTQ's qweight, qzeros, scales and g_idx become BF16.

Source of the format: https://github.com/AutoGPTQ/AutoGPTQ (auto_gptq/nn_modules/qlinear) and
https://github.com/ModelCloud/GPTQModel for its second version; https://github.com/intel/auto-round for its own names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ktforge import CheckpointError, Preprocessor, TensorSpec, Unsupported, hookimpl
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES
from ktforge.model.number_format import DOWNLOAD, NumberFormat, Stored
from ktforge_plugins.preprocess import integers, scales

I32 = DTYPES["I32"]
PARAMETERS = ("qweight", "qzeros", "scales")
BITS = (2, 4, 8)
#: checkpoint_format and, of AutoRound's own files, packing_format → whether zero points are stored less one.
FORMS = {
    "gptq": True, "gptq_v2": False, "auto_round": False, "auto_round:gptqmodel": False, "auto_round:auto_gptq": True,
    "auto_round:gptq": True, "auto": True,
}  # fmt: skip
#: What to do about a form that is not read.
MEND = "get the model in BF16, FP8 or AWQ instead"


class Gptq(NumberFormat):
    """2, 4 or 8 bits, symmetric or not, any group size, with or without an order of columns (desc_act).

    qweight int32 [in * bits / 32, out] packs along the inputs, qzeros int32 [groups, out * bits / 32] along the
    outputs, scales [groups, out]; their shapes tell the bits. value = (code - zero) * scale in float32, rounded once to
    BF16. ``checkpoint_format`` gptq, the first version and the default, stores zero - 1, in as many bits; gptq_v2 the
    zero itself. AutoRound's ``packing_format`` says the same in words of its own.
    """

    name: ClassVar[str] = "gptq"
    rowwise: ClassVar[bool] = True

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
        return Stored((qweight.shape[1], _columns(parameters)), names)

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        bits, columns = _bits(parameters), _columns(parameters)
        words, scale = arrays["qweight"], arrays["scales"].astype(np.float32)
        groups, rows = scale.shape
        zeros = integers.unpacked(arrays["qzeros"], bits)  # [groups, out]
        if FORMS[self._form()]:
            zeros = zeros + np.uint8(1) & np.uint8((1 << bits) - 1)
        group_of = arrays.get("g_idx", np.arange(columns) // -(-columns // groups))
        if group_of.min(initial=0) < 0 or group_of.max(initial=0) >= groups:
            spec = parameters["g_idx"]
            raise CheckpointError(
                f"{spec.file or 'the checkpoint'}: {spec.name} points to a group outside the {groups}"
            )

        def codes(some: slice) -> np.ndarray:  # begins and ends with a word
            return integers.unpacked_rows(words[some.start * bits // 32 : some.stop * bits // 32], bits)

        return integers.affine_by_input(codes, (columns, rows), zeros, scale, group_of)

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        columns, rows = _columns(parameters), parameters["qweight"].shape[1]
        # Scales as float32, zero points a byte each and once more for the 1, groups of the columns.
        return integers.scratch(columns, rows) + 7 * math.prod(parameters["scales"].shape) + 16 * columns

    def _form(self) -> str:
        said = (self._quantization.get(k) for k in ("checkpoint_format", "packing_format", "format"))
        return str(next((form for form in said if form is not None), "gptq"))

    def _problems(self, parameters: Mapping[str, TensorSpec]) -> Iterator[str]:
        qweight = parameters["qweight"]
        form = "marlin" if self._quantization.get("is_marlin_format") is True else self._form()
        if form not in FORMS:
            yield f"this is GPTQ in the form {form}; {self.name} reads gptq and gptq_v2: {MEND}"
            return
        missing = [p for p in PARAMETERS if p not in parameters]
        if missing:
            yield f"{qweight.name} is packed, but {' and '.join(missing)} are missing from the checkpoint: {DOWNLOAD}"
            return
        rows = qweight.shape[1]
        scale, zeros, order = parameters["scales"], parameters["qzeros"], parameters.get("g_idx")
        scales.check_dtype(scale, scales.FLOATS)
        if len(scale.shape) != 2 or scale.shape[1] != rows or not scale.shape[0]:
            yield f"{scale} does not fit {qweight}"
            return
        if zeros.dtype != I32 or len(zeros.shape) != 2 or zeros.shape[0] != scale.shape[0]:
            yield f"{zeros} does not fit {scale}"
            return
        bits = _bits(parameters)
        if bits not in BITS or bits * rows != 32 * zeros.shape[1]:
            odd = bits in (3, 5, 6, 7) and bits * rows == 32 * zeros.shape[1]
            yield (
                f"this is GPTQ of {bits} bits; {self.name} reads 2, 4 and 8: {MEND}"
                if odd
                else f"{zeros} does not fit {scale} in 2, 4 or 8 bits"
            )
            return
        columns = _columns(parameters)
        if scale.shape[0] > columns:
            yield f"{scale} does not fit {qweight}"
        elif order is None and columns % scale.shape[0]:
            yield f"{scale} does not divide {columns} columns into groups, and there is no g_idx"
        if order is not None and (order.dtype.kind != "i" or order.shape != (columns,)):
            yield f"{order} must be integers [{columns}]"


def _bits(parameters: Mapping[str, TensorSpec]) -> int:
    """By the words that the zero points of a group take; in mixed checkpoints config.json does not know."""
    return 32 * parameters["qzeros"].shape[1] // max(1, parameters["scales"].shape[1])


def _columns(parameters: Mapping[str, TensorSpec]) -> int:
    return parameters["qweight"].shape[0] * 32 // _bits(parameters)


def _is_gptq(qweight: TensorSpec, scale: TensorSpec | None, method: object) -> bool:
    """By shapes: the outputs are whole here and packed in AWQ. Without usable ones, config.json's word counts."""
    if scale is not None and len(scale.shape) == 2 and len(qweight.shape) == 2:
        return qweight.shape[1] == scale.shape[1]
    return method != "awq" and len(qweight.shape) == 2


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Gptq]
