"""Preprocessor ``awq``: AWQ's qweight, qzeros and scales become BF16.

Source of the format: https://github.com/casper-hansen/AutoAWQ (awq/modules/linear/gemm.py), for 8 bits
https://github.com/vllm-project/vllm (awq_pack in quantization/utils/quant_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ktforge import Preprocessor, TensorSpec, Unsupported, hookimpl
from ktforge.stages import PlanKey, alike
from ktforge.tensors import DTYPES
from ktforge_plugins.preprocess import integers, scales
from ktforge_plugins.preprocess.number_format import NumberFormat, Stored

I32 = DTYPES["I32"]
PARAMETERS = ("qweight", "qzeros", "scales")
#: Bits → where in its word the code of each output lies.
PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


class Awq(NumberFormat):
    """4 or 8 bits, asymmetric, in the interleaved order of the gemm version.

    qweight int32 [in, out * bits / 32] and qzeros int32 [groups, out * bits / 32] pack along the outputs, scales
    [groups, out]. value = (code - zero) * scale in float32, rounded once to BF16.
    """

    name: ClassVar[str] = "awq"

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        qweight, scale = parameters.get("qweight"), parameters.get("scales")
        if qweight is None or qweight.dtype != I32 or len(qweight.shape) != 2:
            return None
        if scale is not None and scale.shape[-1:] == qweight.shape[-1:]:
            return None  # outputs are not packed: GPTQ
        problems = list(self._problems(qweight, parameters))
        if problems:
            raise Unsupported(*problems)
        assert scale is not None
        return Stored((scale.shape[1], qweight.shape[0]), frozenset(PARAMETERS))

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        scale = arrays["scales"].astype(np.float32)
        groups, rows = scale.shape
        bits = arrays["qweight"].shape[1] * 32 // rows
        codes, zeros = (_in_order(integers.unpacked(arrays[p], bits), bits) for p in ("qweight", "qzeros"))
        columns = codes.shape[0]
        group_of = np.arange(columns) // (columns // groups)
        return integers.affine_by_input(codes, zeros, scale, group_of)

    def _problems(self, qweight: TensorSpec, parameters: Mapping[str, TensorSpec]) -> Iterator[str]:
        missing = [p for p in PARAMETERS if p not in parameters]
        if missing:
            yield f"{qweight.name} is packed, but {' and '.join(missing)} are missing from the checkpoint"
            return
        version = self._quantization.get("version", "gemm")
        if str(version).lower() != "gemm":
            yield f"{qweight.name} is of AWQ's version {version}; {self.name} reads gemm"
        scale, zeros = parameters["scales"], parameters["qzeros"]
        scales.check_dtype(scale, scales.FLOATS)
        columns, words = qweight.shape
        if len(scale.shape) != 2 or scale.shape[1] not in (words * 8, words * 4):
            yield f"{scale} does not fit {qweight} in 4 or 8 bits"
        elif not scale.shape[0] or columns % scale.shape[0]:
            yield f"{scale} does not divide {columns} columns into groups"
        elif zeros.dtype != I32 or zeros.shape != (scale.shape[0], words):
            yield f"{zeros} does not fit {scale}"


def _in_order(codes: np.ndarray, bits: int) -> np.ndarray:
    places = PLACES[bits]
    return codes.reshape(codes.shape[0], -1, len(places))[:, :, places].reshape(codes.shape)


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [Awq]
