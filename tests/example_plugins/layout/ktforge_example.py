"""The layout ``example``: int8 codes and float32 scales as they are, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ktforge import (
    Layout,
    PackedSpec,
    PackedUnit,
    Part,
    Preset,
    QuantPart,
    QuantSpec,
    QuantUnit,
    TensorSpec,
    UnitSpec,
    Unsupported,
    hookimpl,
)
from ktforge.contract.stages import PlanKey, alike
from ktforge.contract.tensors import BF16, F32

CODES, SCALES = ".codes", ".scales"


class ExampleLayout(Layout):
    """For a weight ``x.weight``, the codes I8 [n, k] as ``x.codes`` and the scales F32 [n, groups] as ``x.scales``."""

    name: ClassVar[str] = "example"

    def plan_key(self) -> PlanKey:
        return alike

    def plan(self, spec: QuantSpec) -> PackedSpec:
        if not spec.symmetric or spec.scale_dtype != F32:
            raise Unsupported(f"{self.name} has no place for zero points, nor for scales other than F32")
        tensors = []
        for part in spec.parts:
            stem = _stem(spec.unit, part)
            tensors.append(TensorSpec(stem + CODES, np.dtype(np.int8), part.shape))
            tensors.append(TensorSpec(stem + SCALES, F32, (part.shape[0], spec.groups(part))))
        return PackedSpec(tuple(tensors), f"{self.name}/1")

    def pack(self, unit: QuantUnit, out: PackedUnit) -> None:
        for part, quantised in zip(unit.spec.parts, unit.parts, strict=True):
            stem = _stem(unit.spec.unit, part)
            out[stem + CODES][:] = quantised.codes
            out[stem + SCALES][:] = quantised.scales

    def find(
        self, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any], read: Callable[[TensorSpec], np.ndarray]
    ) -> Iterator[QuantSpec]:
        """With this and `unpack`, `ktforge dequantize` reads outputs, and `ktforge inspect` knows them."""
        for name, codes in tensors.items():
            stem = name.removesuffix(CODES)
            scales = tensors.get(stem + SCALES)
            if name == stem or scales is None or codes.dtype != np.int8 or len(codes.shape) != 2:
                continue
            n, k = codes.shape
            weight = TensorSpec(f"{stem}.weight", BF16, (n, k), codes.file)
            part = Part("", 0, (0, n), (0, k))
            yield QuantSpec(UnitSpec(stem, {"weight": weight}), (part,), 8, f"{self.name}/1", k // scales.shape[1])

    def unpack(self, packed: PackedUnit, spec: QuantSpec) -> QuantUnit:
        stems = [_stem(spec.unit, part) for part in spec.parts]
        return QuantUnit(spec, tuple(QuantPart(packed[stem + CODES], packed[stem + SCALES]) for stem in stems))


def _stem(unit: UnitSpec, part: Part) -> str:
    return unit.tensors[part.role].name.removesuffix(".weight")


@hookimpl
def ktforge_layouts() -> Iterable[type[Layout]]:
    return [ExampleLayout]


@hookimpl
def ktforge_presets() -> Iterable[Preset]:
    """`ktforge convert --quant-method example`."""
    return [Preset("example", {"use": "int8", "group_size": 32}, {"use": "example"}, "INT8 in groups of 32")]
