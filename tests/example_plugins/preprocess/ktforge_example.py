"""The preprocessor ``example``: a number format, int8 codes with the largest magnitude of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from ktforge import NumberFormat, Preprocessor, TensorSpec, Unsupported, hookimpl
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16
from ktforge.model.number_format import Stored


class ExampleFormat(NumberFormat):
    """``weight`` holds int8 codes [n, k], ``row_max`` float32 [n]; the weight is code / 127 * row_max, as BF16."""

    name: ClassVar[str] = "example"
    #: An expert does not depend on the others, so a layer's fused experts may come one by one.
    rowwise: ClassVar[bool] = True

    def plan_key(self) -> PlanKey:
        return alike

    def stored(self, parameters: Mapping[str, TensorSpec]) -> Stored | None:
        if "row_max" not in parameters:
            return None  # another format, or none
        weight, row_max = parameters.get("weight"), parameters["row_max"]
        if weight is None or weight.dtype != np.int8 or len(weight.shape) != 2:
            raise Unsupported(f"{row_max} has no I8 weight [n, k] beside it")
        if row_max.dtype != np.float32 or row_max.shape != weight.shape[:1]:
            raise Unsupported(f"{row_max} is no F32 [{weight.shape[0]}], a number for each row of {weight}")
        return Stored((weight.shape[0], weight.shape[1]), frozenset(["weight", "row_max"]))

    def dequantize(self, arrays: Mapping[str, np.ndarray], parameters: Mapping[str, TensorSpec]) -> np.ndarray:
        scales = arrays["row_max"] / np.float32(127)
        return (arrays["weight"] * scales[:, None]).astype(BF16)

    def scratch(self, parameters: Mapping[str, TensorSpec]) -> int:
        return 4 * (parameters["weight"].nbytes + parameters["row_max"].nbytes)  # the product is float32


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [ExampleFormat]
