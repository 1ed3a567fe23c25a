"""INT4 codes with error feedback, from inputs that a calibration kept. Not a plugin itself."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ktforge import QuantSpec, Unit, UnitSpec, Unsupported, native
from ktforge.calibration import Calibration

#: What is added to the diagonal of second moments, of its mean.
DAMPING = 0.01
#: Tokens that were routed elsewhere and stand in for those that an expert did not get.
OTHERS = 1024
#: Tokens for each column at which an expert's own inputs count as much as the others'.
OWN = 2
#: Layers whose factor is kept: workers are in one layer, or at the border of two.
LAYERS = 2


class Factor(NamedTuple):
    """``order``: uint32 [k], the columns by falling mean square of their inputs; ``factor``: float32 [k, k], in this
    order; ``squares``: float32 [k], these mean squares."""

    order: np.ndarray
    factor: np.ndarray
    squares: np.ndarray


def check_inputs(calibration: Calibration, unit: UnitSpec) -> None:
    """Raises Unsupported, while planning, if there are no inputs of an expert's layer, or none of its activation."""
    calibration.check(unit)
    assert unit.layer is not None
    if calibration.layers[unit.layer].inputs is None:
        raise Unsupported(
            f"{calibration.path} has no inputs of layer {unit.layer}, which scales: feedback needs: make it with "
            "`ktforge calibrate --samples 4096`, or say scales: calibrated"
        )
    if calibration.activation not in ("silu", "swish"):
        raise Unsupported(
            f"scales: feedback computes what goes into down for silu alone, and {calibration.path} says "
            f"{calibration.activation}: say scales: calibrated"
        )
    if unit.projections().keys() != {"gate", "up", "down"}:
        raise Unsupported("scales: feedback is for experts of gate, up and down in one unit")


def _factor_of(moments: np.ndarray) -> Factor:
    squares = np.ascontiguousarray(np.diag(moments))
    order = np.argsort(-squares, kind="stable").astype(np.uint32)
    return Factor(order, native.factor(np.ascontiguousarray(moments[order][:, order]), DAMPING), squares)


class _Kept:
    """What was made last; whoever asks for what is being made waits for it."""

    def __init__(self) -> None:
        self._made: OrderedDict[Any, Factor] = OrderedDict()
        self._making = threading.Lock()

    def get(self, key: Any, make: Callable[[], Factor]) -> Factor:
        with self._making:
            if key not in self._made:
                self._made[key] = make()
                while len(self._made) > LAYERS:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return self._made[key]


_kept = _Kept()


def factors(calibration: Calibration, unit: Unit) -> dict[str, Factor]:
    """projection → the factor of its inputs' second moments: of gate and up that of the layer, made once for all its
    experts; of down that of this expert's own inputs and, in proportion, of what it makes of other tokens."""
    layer, expert = unit.spec.layer, unit.spec.expert
    assert layer is not None and expert is not None
    known = calibration.layers[layer]
    assert known.inputs is not None and known.routed is not None
    inputs = np.ascontiguousarray(known.inputs.astype(np.float32))
    first = _kept.get((id(calibration), layer), lambda: _factor_of(native.second_moments(inputs)))
    mine = (known.routed == expert).any(axis=1)
    others = np.flatnonzero(~mine)[:: max(1, int((~mine).sum()) // OTHERS)]
    moments = np.zeros(())
    part = mine.sum() / (mine.sum() + OWN * unit.tensors["down.weight"].shape[1])
    for tokens, share in ((np.flatnonzero(mine), part), (others, 1 - part)):
        if len(tokens):
            # Where one kind is missing, the other stands for all.
            share = share if len(others) and mine.any() else 1.0
            moments = moments + np.float32(share) * native.second_moments(_middle(inputs[tokens], unit))
    return {"gate": first, "up": first, "down": _factor_of(np.ascontiguousarray(moments, np.float32))}


def _middle(inputs: np.ndarray, unit: Unit) -> np.ndarray:
    """What goes into down, float32 [n, expert size]."""
    gate, up = (
        native.product(inputs, np.ascontiguousarray(unit.tensors[f"{p}.weight"].astype(np.float32).T))
        for p in ("gate", "up")
    )
    return native.silu(gate, up)


def codes_of(weight: np.ndarray, spec: QuantSpec, group_size: int, known: Factor, scales: np.ndarray) -> np.ndarray:
    """int8 codes [n, k] of a whole projection, for float32 ``scales`` [n, k / group_size] of the stored step."""
    codes = np.empty(weight.shape, np.int8)
    native.feedback(weight, spec.bits, group_size, known.order, known.factor, scales, codes, step=spec.step)
    return codes


def scratch_bytes(unit: UnitSpec, calibration: Calibration) -> int:
    """Bytes that an expert takes beside its weights: inputs and what goes into down for all tokens, weights in float32,
    second moments and their factor, and the factorisation in float64. The layer's are shared, and counted with each."""
    layer = calibration.layers[unit.layer if unit.layer is not None else -1]
    assert layer.inputs is not None
    tokens, hidden, size = len(layer.inputs), layer.gate_up.shape[1], layer.down.shape[1]
    widest = max(hidden, size)
    moments = 4 * 3 * widest * widest + native.factor_bytes(widest)
    return 4 * tokens * (hidden + 3 * size) + 4 * 2 * hidden * size + moments
