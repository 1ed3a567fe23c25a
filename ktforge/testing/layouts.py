"""The check of a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ktforge.contract.checks import delivered_parts, expected, expected_tensors
from ktforge.contract.stages import Layout, Quantizer, Result
from ktforge.contract.tensors import PackedSpec, PackedUnit, QuantSpec, QuantUnit, TensorSpec, Unit
from ktforge.testing.common import bound, check_config, check_plan_key, check_scratch, kept, peak_of, read_only
from ktforge.testing.quantizers import quantised, quantised_spec
from ktforge.testing.units import expert

#: Bytes on either side of a buffer that nobody may write.
GUARD = 64


def check_layout(
    layout: Layout, quantizer: Quantizer, unit: Unit | None = None, *, config: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Asserts that a layout keeps its contract on what ``quantizer`` makes of ``unit``, and returns the packed tensors.

    The plan says names and sizes; packing fills every byte of every buffer and no other, and does not depend on what
    was in them; what ``fused`` gives fills them alike; memory is what ``scratch_bytes`` says. A layout with ``unpack``
    gives back what was quantised; where ``config`` says what config.json does, one with ``find`` finds that.
    """
    quantizer, layout, unit = bound(quantizer, config), bound(layout, config), read_only(unit or expert())
    spec = quantised_spec(quantizer, layout, unit.spec)
    packed = _packed_spec(layout, spec)
    check_plan_key(layout, unit.spec, lambda u: layout.plan(quantizer.plan(u, layout.demand(u))))
    made = quantised(quantizer, layout, unit, spec)
    out = _filled(lambda buffers: layout.pack(made, buffers), packed.tensors)
    buffers = {name: np.empty_like(array) for name, array in out.items()}
    check_scratch(layout, peak_of(lambda: layout.pack(made, buffers))[1], 0, layout.scratch_bytes(spec))
    fused = layout.fused(quantizer, spec)
    if fused is not None:
        same = _filled(lambda buffers: fused(unit, buffers), packed.tensors)
        for name, array in out.items():
            assert same[name].tobytes() == array.tobytes(), f"{name}: fused() fills it with other bytes than pack()"
    results = [Result(unit.spec, quantizer, spec, packed, fused is not None)]
    edited = check_config(layout, config, results)
    if type(layout).unpack is not Layout.unpack:
        _check_unpack(layout, made, out)
    if type(layout).find is not Layout.find and config is not None:
        _check_find(layout, made.spec, out, edited)
    return out


def _packed_spec(layout: Layout, spec: QuantSpec) -> PackedSpec:
    with kept():
        packed = expected(layout, layout.plan(spec), PackedSpec, spec.unit.name)
        expected_tensors(layout, packed.tensors, spec.unit.name)
    names = [t.name for t in packed.tensors]
    assert len(set(names)) == len(names), f"a tensor name is planned twice: {names}"
    assert "/" in packed.format, f"the format {packed.format!r} has no version, as in name/1"
    return packed


def _filled(fill: Callable[[PackedUnit], None], tensors: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """The buffers as ``fill`` leaves them, whatever was in them before."""
    runs = [_guarded(fill, tensors, before) for before in (0x00, 0xFF)]
    for tensor in tensors:
        first, second = (run[tensor.name].tobytes() for run in runs)
        assert first == second, f"{tensor}: some bytes are not written, or depend on what was in the buffer"
    return runs[0]


def _guarded(fill: Callable[[PackedUnit], None], tensors: Sequence[TensorSpec], before: int) -> dict[str, np.ndarray]:
    """Fills buffers that begin as ``before`` and have a guard on either side."""
    raw = {t.name: np.full(t.nbytes + 2 * GUARD, before, np.uint8) for t in tensors}
    out = {t.name: raw[t.name][GUARD : GUARD + t.nbytes].view(t.dtype).reshape(t.shape) for t in tensors}
    fill(out)
    for name, buffer in raw.items():
        outside = np.concatenate([buffer[:GUARD], buffer[-GUARD:]])
        assert (outside == before).all(), f"{name}: bytes outside the buffer were written"
    return out


def _check_unpack(layout: Layout, made: QuantUnit, out: Mapping[str, np.ndarray]) -> None:
    with kept():
        back = delivered_parts(layout, layout.unpack(out, made.spec), made.spec, layout, trust=False)
    for part, got, packed in zip(made.spec.parts, back.parts, made.parts, strict=True):
        for what in ("codes", "scales", "zeros"):
            same = np.array_equal(getattr(got, what), getattr(packed, what))
            assert same, f"{part.projection} {part.index}: unpack() gives other {what} than were packed"


def _check_find(layout: Layout, spec: QuantSpec, out: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    tensors = {name: TensorSpec(name, array.dtype, array.shape) for name, array in out.items()}
    found = list(layout.find(tensors, config, lambda tensor: out[tensor.name]))
    shapes = [part.shape for one in found for part in one.parts]
    packed = [part.shape for part in spec.parts]
    assert sorted(shapes) == sorted(packed), f"find() finds weights of {shapes} where {packed} are packed"
    for one in found:
        with kept():
            delivered_parts(layout, layout.unpack(out, one), one, layout, trust=False)
