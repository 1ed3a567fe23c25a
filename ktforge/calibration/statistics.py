"""What is known of the inputs of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ktforge.contract.tensors import UnitSpec
from ktforge.errors import CheckpointError, Unsupported

#: Tokens for each column of a weight at which an expert's own statistics count as much as its layer's. Measured for
#: second moments of a small trained model (docs/quality.md): n / (n + 2 columns).
OWN = 2


@dataclass(frozen=True)
class LayerStatistics:
    """Of one layer's experts. ``tokens`` int64 [experts]: how many were routed to each; all 0 where nobody counted.
    ``gate_up`` float32 [experts, hidden] and ``down`` float32 [experts, expert size]: mean squares of the channels of
    their inputs. ``inputs`` bfloat16 [n, hidden] and ``routed`` int32 [n, top_k]: inputs themselves and the experts
    that they went to."""

    tokens: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    inputs: np.ndarray | None = None
    routed: np.ndarray | None = None

    def problem(self) -> str | None:
        """What makes no sense in these, if anything."""
        experts = len(self.tokens)
        for name, array in (("gate_up", self.gate_up), ("down", self.down)):
            if array.ndim != 2 or len(array) != experts or not array.size:
                return f"{name} is {list(array.shape)}, for {experts} experts"
            if not np.isfinite(array).all() or (array < 0).any():
                return f"{name} holds what is no mean square: NaN, infinity or a negative number"
        if (self.tokens < 0).any():
            return "tokens holds a negative number"
        if (self.inputs is None) != (self.routed is None):
            return "inputs and routed are there together or not at all"
        if self.inputs is not None and self.routed is not None:
            if self.inputs.ndim != 2 or self.inputs.shape[1] != self.gate_up.shape[1]:
                return f"inputs is {list(self.inputs.shape)}, and gate_up {list(self.gate_up.shape)}"
            if self.routed.ndim != 2 or len(self.routed) != len(self.inputs):
                return f"routed is {list(self.routed.shape)}, and inputs {list(self.inputs.shape)}"
            if (self.routed < 0).any() or (self.routed > experts).any():
                return f"routed names experts that are none of {experts}"
        return None


@dataclass(frozen=True)
class Calibration:
    """A file of statistics. ``layers``: the number of a layer → what is known of its experts. ``activation``: what is
    applied to gate, such as ``silu``; None where the file does not say."""

    path: Path
    layers: Mapping[int, LayerStatistics]
    activation: str | None = None
    _blended: dict[tuple[int, str], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def mean_squares(self, unit: UnitSpec, projection: str) -> np.ndarray:
        """float32 [columns]: the mean square of each input channel of a projection, ``gate``, ``up`` or ``down``.

        An expert's own statistics count for n / (n + 2 columns) if n tokens were routed to it, those of its layer, the
        mean over all tokens, for the rest.
        """
        if unit.layer is None or unit.expert is None:
            raise ValueError(f"{unit.name} is no expert")
        key = unit.layer, "down" if projection == "down" else "gate_up"
        if key not in self._blended:
            layer = self.layers[unit.layer]
            self._blended[key] = blended(getattr(layer, key[1]), layer.tokens)
        return self._blended[key][unit.expert]

    def check(self, unit: UnitSpec) -> None:
        """Raises Unsupported, while planning, if an expert's projections are not those that the file knows."""
        layer = self.layers.get(unit.layer) if unit.layer is not None else None
        if unit.layer is None or unit.expert is None:
            raise Unsupported(f"{self.path} knows of routed experts alone")
        if layer is None:
            raise Unsupported(
                f"{self.path} knows nothing of layer {unit.layer}: it is of another model, or of a part of this one"
            )
        if unit.expert >= len(layer.tokens):
            raise Unsupported(
                f"{self.path} knows {len(layer.tokens)} experts in layer {unit.layer}: it is of another model"
            )
        for projection, parameters in unit.projections().items():
            known = (layer.down if projection == "down" else layer.gate_up).shape[1]
            columns = parameters["weight"].shape[1] if "weight" in parameters else known
            if columns != known:
                raise Unsupported(
                    f"{self.path} has {known} input channels for {projection} of layer {unit.layer}, and the weight "
                    f"has {columns}: it is of another model"
                )


def blended(own: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32 [experts, columns] from mean squares of the same shape and the tokens [experts] behind each.

    Where nobody counted, each expert's own. An expert that is not known at all gets the layer's.
    """
    counts = tokens.astype(np.float64)[:, None]
    if not counts.any():
        return np.ascontiguousarray(own)
    layer = (own.astype(np.float64) * counts).sum(axis=0) / counts.sum()
    part = counts / (counts + OWN * own.shape[1])
    return (own * part + layer * (1 - part)).astype(np.float32)


def checked(path: Path, layers: Mapping[int, LayerStatistics], activation: str | None = None) -> Calibration:
    """Raises CheckpointError for statistics that make no sense, or if there are none."""
    if not layers:
        raise CheckpointError(f"{path} has statistics of no routed experts")
    for number, layer in layers.items():
        if problem := layer.problem():
            raise CheckpointError(f"{path}, layer {number}: {problem}")
    return Calibration(path, layers, activation)
