"""Preprocessor ``moe-to-bf16``: experts of any float precision become BF16, and FP8 becomes BF16 wherever it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import Preprocessor, TensorSpec, Unit, UnitSpec, Unsupported, hookimpl, native
from ktforge.lazy import LazyTensors
from ktforge.tensors import BF16, F8_E4M3, dtype_name

#: The parameters of a weight that this stage understands; an expert's bias passes through.
SCALE = "weight_scale_inv"
KNOWN = {"weight", SCALE, "bias"}
_TYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3"}


class MoeToBf16(Preprocessor):
    """Experts in FP32, FP16 or block-scaled FP8 (e4m3 with ``weight_scale_inv``) become BF16.

    Other FP8 weights become BF16 too, since ``quantization_config`` leaves config.json with the experts; other
    tensors stay as they are. ``input_type`` is a promise about the experts that is checked.
    """

    name: ClassVar[str] = "moe-to-bf16"
    input_type: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"

    _block: tuple[int, int] | None = PrivateAttr(default=None)

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._block = _block_size(config)
        return bound

    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        tensors = dict(unit.tensors)
        for projection, parameters in unit.projections().items():
            prefix = f"{projection}." if projection else ""
            if unit.is_expert:
                self._check_expert(projection, parameters)
            weight = parameters.get("weight")
            if weight is not None and weight.dtype == F8_E4M3:
                self._check_scale(weight, parameters.get(SCALE))
                del tensors[prefix + SCALE]
            elif not unit.is_expert:
                continue
            if weight is not None and weight.dtype != BF16:
                tensors[prefix + "weight"] = replace(weight, dtype=BF16)
        return [unit if tensors == unit.tensors else unit.with_tensors(tensors)]

    def apply(self, unit: Unit) -> Iterator[Unit]:
        (planned,) = self.plan(unit.spec)
        made: dict[str, np.ndarray] = {}
        fp8: dict[str, native.Fp8Blocks] = {}
        for role, spec in planned.tensors.items():
            array = unit.tensors[role]
            if array.dtype == spec.dtype:
                made[role] = array
            elif array.dtype == F8_E4M3:
                assert self._block is not None
                fp8[role] = native.Fp8Blocks(array, unit.tensors[role + "_scale_inv"].astype(np.float32), self._block)
            else:
                made[role] = native.to_bf16(array)
        yield Unit(planned, LazyTensors(made, fp8))

    def edit_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        edited = {k: v for k, v in config.items() if k != "quantization_config"}
        text = edited.get("text_config")
        if isinstance(text, Mapping):
            edited["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
        return edited

    def _check_expert(self, projection: str, parameters: Mapping[str, TensorSpec]) -> None:
        weight = parameters.get("weight")
        strange = sorted(parameters.keys() - KNOWN)
        if weight is None or strange:
            raise Unsupported(
                f"{projection} is stored as {', '.join(sorted(parameters))}, "
                f"which {self.name} does not read: it reads weight, with {SCALE} if that is FP8"
            )
        found = dtype_name(weight.dtype)
        if found not in _TYPES.values():
            raise Unsupported(f"{projection} is {found}, which {self.name} does not read")
        if self.input_type != "auto" and _TYPES[self.input_type] != found:
            word = next(word for word, name in _TYPES.items() if name == found)
            raise Unsupported(
                f"the input type was given as {self.input_type}, but {projection} is {found}: say {word} or auto"
            )
        if SCALE in parameters and weight.dtype != F8_E4M3:
            raise Unsupported(f"{projection} is {found} and yet has a {SCALE}, which belongs to FP8")

    def _check_scale(self, weight: TensorSpec, scale: TensorSpec | None) -> None:
        if scale is None:
            raise Unsupported(f"{weight.name} is FP8, but {weight.name}_scale_inv is missing from the checkpoint")
        if scale.dtype not in (np.dtype(np.float32), BF16):
            raise Unsupported(f"{scale.name} is {dtype_name(scale.dtype)}; it must be F32 or BF16")
        if self._block is None:
            raise Unsupported(
                f"{weight.name} is FP8, but config.json has no quantization_config.weight_block_size [rows, columns]"
            )
        if len(weight.shape) != 2:
            raise Unsupported(f"{weight} is FP8 but no matrix")
        expected = tuple(-(-n // b) for n, b in zip(weight.shape, self._block, strict=True))
        if scale.shape != expected:
            raise Unsupported(
                f"{scale.name} is {list(scale.shape)}; blocks of {list(self._block)} (config.json) over "
                f"{list(weight.shape)} need {list(expected)}"
            )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """quantization_config.weight_block_size, at the top or in text_config; None if there is none that makes sense."""
    for level in (config, config.get("text_config")):
        quantization = level.get("quantization_config") if isinstance(level, Mapping) else None
        block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
        if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
            return block[0], block[1]
    return None


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [MoeToBf16]
