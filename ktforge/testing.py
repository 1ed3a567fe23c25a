"""The kit for tests of plugins: a checkpoint and an output in memory, and checks that a stage keeps its contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, PrivateAttr

from ktforge.contract.plan import Plan, Sink, Writer
from ktforge.contract.stages import Layout, Loader, PlanKey, Quantizer, alike
from ktforge.contract.tensors import (
    BF16,
    PROJECTIONS,
    FileSpec,
    QuantPart,
    QuantSpec,
    QuantUnit,
    TensorSpec,
    Unit,
    UnitSpec,
)


class MemoryLoader(Loader):
    """A checkpoint in memory: ``tensors`` by name and the content of its config.json."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    name: ClassVar[str] = "memory"
    tensors: dict[str, np.ndarray] = Field(exclude=True)
    model: dict[str, Any] = Field(exclude=True)

    def config(self) -> Mapping[str, Any]:
        return self.model

    def scan(self) -> Iterator[TensorSpec]:
        for name, array in self.tensors.items():
            yield TensorSpec(name, array.dtype, array.shape)

    def read(self, spec: TensorSpec) -> np.ndarray:
        whole = self.tensors[spec.name]
        if spec.shape == whole.shape:
            return whole
        row = spec.offset // whole[:1].nbytes
        return whole[row : row + spec.shape[0]]

    def plan_key(self) -> PlanKey:
        return alike

    def rows(self, spec: TensorSpec, start: int, stop: int) -> TensorSpec | None:
        return spec.rows(start, stop)


class MemoryWriter(Writer):
    """An output in memory: after a run, ``tensors`` maps names to arrays; after a failed one it is empty."""

    name: ClassVar[str] = "memory"
    _tensors: dict[str, np.ndarray] = PrivateAttr(default_factory=dict)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return self._tensors

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        return [FileSpec("memory", b"", tuple(tensors))]

    @contextmanager
    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> Iterator[Sink]:
        written: dict[str, np.ndarray] = {}

        class _Sink:
            def has(self, tensor: TensorSpec) -> bool:
                return False

            def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
                if row is None:
                    written[tensor.name] = data.copy()
                else:
                    whole = written.setdefault(tensor.name, np.empty(tensor.shape, tensor.dtype))
                    whole[row : row + len(data)] = data

        yield _Sink()
        self._tensors.clear()
        self._tensors.update(written)


def expert(shape: tuple[int, int] = (256, 128), seed: int = 0, layer: int = 0, number: int = 0) -> Unit:
    """An expert with random BF16 weights. ``shape`` is (expert size, hidden size)."""
    size, hidden = shape
    random = np.random.default_rng(seed)
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    arrays = {f"{p}.weight": (random.standard_normal(shapes[p]) * 0.05).astype(BF16) for p in PROJECTIONS}
    name = f"model.layers.{layer}.mlp.experts.{number}"
    specs = {role: TensorSpec(f"{name}.{role}", a.dtype, a.shape) for role, a in arrays.items()}
    return Unit(UnitSpec(name, specs, layer, number), arrays)


def check_quantizer(
    quantizer: Quantizer, layout: Layout, unit: Unit | None = None, *, max_error: float = 0.25
) -> QuantUnit:
    """Asserts that a quantizer keeps its contract on ``unit`` with what ``layout`` demands, and returns what it made.

    Dtypes and shapes are as planned, codes fit their bits, the same input gives the same bytes, and
    code * step * scale is within ``max_error`` (relative, Frobenius) of the weights.
    """
    unit = unit or expert()
    spec = quantizer.plan(unit.spec, layout.demand(unit.spec))
    made, again = quantizer.quantize(unit, spec), quantizer.quantize(unit, spec)
    assert len(made.parts) == len(spec.parts), f"{len(made.parts)} parts made, {len(spec.parts)} planned"
    lowest, highest = (-(1 << (spec.bits - 1)), (1 << (spec.bits - 1)) - 1)
    for part, got, same in zip(spec.parts, made.parts, again.parts, strict=True):
        label = f"{part.projection} {part.index}"
        assert got.codes.dtype == np.int8 and got.codes.shape == part.shape, f"{label}: codes are not int8 {part.shape}"
        assert lowest <= got.codes.min() and got.codes.max() <= highest, f"{label}: codes exceed {spec.bits} bits"
        groups = (part.shape[0], spec.groups(part))
        assert got.scales.dtype == spec.scale_dtype and got.scales.shape == groups, f"{label}: scales are not {groups}"
        assert (got.zeros is None) == spec.symmetric, f"{label}: zero points do not fit symmetric={spec.symmetric}"
        assert np.array_equal(got.codes, same.codes), f"{label}: a second call gives other codes"
        weight = part.of(unit.tensors[part.role]).astype(np.float64)
        error = np.linalg.norm(dequantised(spec, got) - weight) / np.linalg.norm(weight)
        assert error <= max_error, f"{label}: relative error {error:.3f} is over {max_error}"
    return made


def dequantised(spec: QuantSpec, part: QuantPart) -> np.ndarray:
    """The float64 weights [n, k] that a quantised part stands for."""
    columns = part.codes.shape[1]
    size = columns if spec.group_size is None else spec.group_size
    codes = part.codes.astype(np.float64)
    if part.zeros is not None:
        codes -= np.repeat(part.zeros.astype(np.float64), size, axis=1)[:, :columns]
    return codes * spec.step * np.repeat(part.scales.astype(np.float64), size, axis=1)[:, :columns]


def check_layout(layout: Layout, quantizer: Quantizer, unit: Unit | None = None) -> dict[str, np.ndarray]:
    """Asserts that a layout keeps its contract on what ``quantizer`` makes of ``unit``, and returns the packed tensors.

    The plan says names and sizes; packing fills every byte of every buffer and no other, and does not depend on what
    was in them.
    """
    unit = unit or expert()
    spec = quantizer.plan(unit.spec, layout.demand(unit.spec))
    packed = layout.plan(spec)
    names = [t.name for t in packed.tensors]
    assert len(set(names)) == len(names), f"a tensor name is planned twice: {names}"
    assert "/" in packed.format, f"the format {packed.format!r} has no version, as in name/1"
    made = quantizer.quantize(unit, spec)
    runs = [_pack(layout, made, packed.tensors, fill) for fill in (0x00, 0xFF)]
    for tensor in packed.tensors:
        first, second = (run[tensor.name].tobytes() for run in runs)
        assert first == second, f"{tensor}: some bytes are not written, or depend on what was in the buffer"
    return runs[0]


def _pack(layout: Layout, unit: QuantUnit, tensors: Sequence[TensorSpec], fill: int) -> dict[str, np.ndarray]:
    """Packs into buffers that begin as ``fill`` and have a guard on either side."""
    guard = 64
    raw = {t.name: np.full(t.nbytes + 2 * guard, fill, np.uint8) for t in tensors}
    out = {t.name: raw[t.name][guard : guard + t.nbytes].view(t.dtype).reshape(t.shape) for t in tensors}
    layout.pack(unit, out)
    for name, buffer in raw.items():
        outside = np.concatenate([buffer[:guard], buffer[-guard:]])
        assert (outside == fill).all(), f"{name}: bytes outside the buffer were written"
    return out
