"""Preprocessor ``awq``: AWQ's qweight, qzeros and scales become BF16.

Source of the format: https://github.com/casper-hansen/AutoAWQ (awq/modules/linear/gemm.py). It knows 4 bits only; of 8
there are two orders, that which vLLM reads (awq_pack in quantization/utils/quant_utils.py) and that which GPTQModel
writes (quantization/awq/utils/packing_utils.py), and nothing in a checkpoint tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ktforge import Preprocessor, TensorSpec, Unsupported, hookimpl
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import DTYPES
from ktforge.model.number_format import DOWNLOAD, NumberFormat, Stored
from ktforge_plugins.preprocess import integers, scales

I16, I32 = DTYPES["I16"], DTYPES["I32"]
PARAMETERS = ("qweight", "qzeros", "scales")
BITS = 4
#: Where in its word the code of each output lies.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
#: What to do about a form that is not read.
MEND = "get the model in BF16, FP8 or GPTQ instead"


class Awq(NumberFormat):
    """4 bits, asymmetric or not, in the interleaved order of the gemm version.

    qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8] pack along the outputs, scales [groups, out].
    value = (code - zero) * scale in float32, rounded once to BF16.
    """

    name: ClassVar[str] = "awq"
    rowwise: ClassVar[bool] = True

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        qweight, scale = parameters.get("qweight"), parameters.get("scales")
        if qweight is None or len(qweight.shape) != 2 or qweight.dtype not in (I16, I32):
            return None
        if not self._other_order() and scale is not None and scale.shape[-1:] == qweight.shape[-1:]:
            return None  # outputs are not packed: GPTQ
        problems = list(self._problems(qweight, parameters))
        if problems:
            raise Unsupported(*problems)
        assert scale is not None
        return Stored((scale.shape[1], qweight.shape[0]), frozenset(PARAMETERS))

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        words, scale = arrays["qweight"], arrays["scales"].astype(np.float32)
        (groups, rows), columns = scale.shape, words.shape[0]
        group_of = np.arange(columns) // (columns // groups)
        return integers.affine_by_input(
            lambda some: _in_order(words[some]), (columns, rows), _in_order(arrays["qzeros"]), scale, group_of
        )

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        (columns, words), scale = parameters["qweight"].shape, parameters["scales"]
        # Scales as float32, zero points a byte each, groups of the columns.
        return integers.scratch(columns, 8 * words) + 6 * math.prod(scale.shape) + 16 * columns

    def _other_order(self) -> str | None:
        """AWQ's version by config.json, if it is not gemm."""
        if self._quantization.get("quant_method") != "awq":
            return None
        said = (self._quantization.get(k) for k in ("version", "checkpoint_format", "format"))
        version = str(next((v for v in said if v is not None), "gemm")).lower()
        return version if version != "gemm" else None

    def _problems(self, qweight: TensorSpec, parameters: Mapping[str, TensorSpec]) -> Iterator[str]:
        if version := self._other_order():
            yield f"this is AWQ in the order of its version {version}; {self.name} reads gemm: {MEND}"
            return
        if qweight.dtype != I32:
            yield f"this is AWQ in I16 words, as llm-awq writes them; {self.name} reads I32 in gemm's order: {MEND}"
            return
        missing = [p for p in PARAMETERS if p not in parameters]
        if missing:
            yield f"{qweight.name} is packed, but {' and '.join(missing)} are missing from the checkpoint: {DOWNLOAD}"
            return
        scale, zeros = parameters["scales"], parameters["qzeros"]
        scales.check_dtype(scale, scales.FLOATS)
        columns, words = qweight.shape
        bits = 32 * words // scale.shape[1] if len(scale.shape) == 2 and scale.shape[1] else 0
        if bits in (2, 3, 8) and bits * scale.shape[1] == 32 * words:
            order = "; writers of 8 bits do not agree on an order" if bits == 8 else ""
            yield f"this is AWQ of {bits} bits; {self.name} reads 4{order}: {MEND}"
        elif qweight.shape[0] == scale.shape[0]:
            yield f"this is AWQ with outputs first, as in its version gemv; {self.name} reads gemm: {MEND}"
        elif bits != BITS or scale.shape[1] != words * 8:
            yield f"{scale} does not fit {qweight} in 4 bits"
        elif not scale.shape[0] or columns % scale.shape[0]:
            yield f"{scale} does not divide {columns} columns into groups"
        elif zeros.dtype != I32 or zeros.shape != (scale.shape[0], words):
            yield f"{zeros} does not fit {scale}"


def _in_order(words: np.ndarray) -> np.ndarray:
    """The codes (uint8) of int32 ``words`` [n, k / 8], in the order of the outputs."""
    codes = integers.unpacked(words, BITS)
    return codes.reshape(codes.shape[0], -1, len(PLACES))[:, :, PLACES].reshape(codes.shape)


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Awq]
