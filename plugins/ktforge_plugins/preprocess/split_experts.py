"""Preprocessor ``split-experts``: tensors that hold all experts of a layer become one unit an expert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import Preprocessor, TensorSpec, Unit, UnitSpec, Unsupported, hookimpl
from ktforge.contract.plan import ModelConfig
from ktforge.contract.stages import PlanKey, alike
from ktforge.model.architectures import gate_up_of
from ktforge.model.config import quantization_config, read_model_config

PROJECTION_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a tensor of one expert lies in a fused one: of expert ``e``, ``rows`` of the axis of outputs."""

    source: str
    rows: slice
    axis: int
    transposed: bool

    def of(self, expert: np.ndarray) -> np.ndarray:
        """A view of what one expert's share ``expert`` holds for this projection."""
        cut = expert[(slice(None),) * self.axis + (self.rows,)]
        return cut.T if self.transposed else cut

    def shape(self, expert: tuple[int, ...]) -> tuple[int, ...]:
        """That of the view: nothing is made of a shape that may be a stranger's."""
        count = len(range(expert[self.axis])[self.rows])
        cut = (*expert[: self.axis], count, *expert[self.axis + 1 :])
        return cut[::-1] if self.transposed else cut


class SplitExperts(Preprocessor):
    """Fused experts, [E, 2I, H] with [E, H, I] or transposed, become experts with gate, up and down.

    Which of the two it is, hidden and expert size of config.json say: both tensors together leave no doubt, since
    2I = H and I = H cannot both be; where gate and up are apart and I = H, ``order`` must say it. ``gate_up`` says how
    gate and up share a tensor; ``auto`` asks the architecture files. Tensors are cut as views, so that only what the
    next stage reads of a large tensor is in memory.
    """

    name: ClassVar[str] = "split-experts"
    rowwise: ClassVar[bool] = True
    experts_only: ClassVar[bool] = True
    gate_up: Literal["auto", "halves", "interleaved"] = "auto"
    order: Literal["auto", "out-in", "in-out"] = "auto"

    _model: ModelConfig | None = PrivateAttr(default=None)
    _block: object = PrivateAttr(default=None)

    def bind(self, config: Mapping[str, Any]) -> Self:
        bound = self.model_copy()
        bound._model = read_model_config(config)
        bound._block = quantization_config(config).get("weight_block_size")
        return bound

    def plan_key(self) -> PlanKey:
        return alike

    def plan(self, unit: UnitSpec) -> Sequence[UnitSpec]:
        if not unit.fused:
            return [unit]
        cuts = self._cuts(unit)
        specs = {}
        for role, cut in cuts.items():
            source = unit.tensors[cut.source]
            specs[role] = TensorSpec("", source.dtype, cut.shape(source.shape[1:]), source.file, source.offset)
        return [self._expert(unit, specs, e) for e in range(unit.experts)]

    def apply(self, unit: Unit) -> Iterator[Unit]:
        if not unit.spec.fused:
            yield unit
            return
        cuts = self._cuts(unit.spec)
        for number, planned in enumerate(self.plan(unit.spec)):
            views = {role: cut.of(unit.tensors[cut.source][number]) for role, cut in cuts.items()}
            yield Unit(planned, {role: np.ascontiguousarray(view) for role, view in views.items()})

    @staticmethod
    def _expert(unit: UnitSpec, specs: Mapping[str, TensorSpec], number: int) -> UnitSpec:
        stem = f"{unit.name}.{number}" if unit.name.endswith(".experts") else f"{unit.name}.experts.{number}"
        tensors = {}
        for role, spec in specs.items():
            projection, _, parameter = role.partition(".")
            tensors[role] = spec._replace(name=f"{stem}.{PROJECTION_NAMES[projection]}.{parameter}")
        return UnitSpec(stem, tensors, unit.layer, number)

    def _cuts(self, unit: UnitSpec) -> dict[str, _Cut]:
        """Role of an expert → where it is cut from. Raises Unsupported with all that does not fit."""
        assert self._model is not None
        odd = [t for t in unit.tensors.values() if t.shape[:1] != (unit.experts,)]
        if odd:
            raise Unsupported(*(f"{t} has no first axis of {unit.experts} experts" for t in odd))
        flat = [t for t in unit.tensors.values() if len(t.shape) == 1]
        if flat:
            raise Unsupported(*(f"{t} has one number an expert: put moe-to-bf16 before {self.name}" for t in flat))
        transposed = self._transposed(unit)
        cuts = {}
        for ours in ("gate", "up", "down"):
            for role, tensor in unit.tensors.items():
                projection, _, parameter = role.partition(".")
                fused = projection == "gate_up" and ours != "down"
                if projection != ours and not fused:
                    continue
                flip = transposed and len(tensor.shape) == 3  # the weight and what is laid out like it
                axis = 1 if flip else 0
                rows = self._rows(ours, tensor, axis) if fused else slice(None)
                cuts[f"{ours}.{parameter}"] = _Cut(role, rows, axis, flip)
        return cuts

    def _transposed(self, unit: UnitSpec) -> bool:
        """Whether weights are [E, in, out]. Packed ones never are: their inner axis is that of the packing."""
        assert self._model is not None
        size, hidden = self._model.expert_size, self._model.hidden
        wide = {"gate_up": 2 * size, "gate": size, "up": size}
        weights = {r.partition(".")[0]: t for r, t in unit.tensors.items() if r.endswith(".weight")}
        if not weights:
            return False

        def fits(transposed: bool) -> bool:
            shapes = {p: (wide[p], hidden) if p in wide else (hidden, size) for p in weights}
            return all(t.shape[1:] == (shapes[p][::-1] if transposed else shapes[p]) for p, t in weights.items())

        tried = {"auto": (False, True), "out-in": (False,), "in-out": (True,)}[self.order]
        fitting = [transposed for transposed in tried if fits(transposed)]
        if not fitting:
            shapes = " and ".join(map(str, weights.values()))
            which = "either axis order" if self.order == "auto" else f"the order {self.order}"
            raise Unsupported(
                f"{shapes} do not fit hidden size {hidden} and expert size {size} (config.json) in {which}"
            )
        if len(fitting) > 1:
            raise Unsupported(
                f"hidden and expert size are both {size}, so the axis order of {', '.join(weights)} is not known: "
                f"say {self.name} {{order: out-in}} or in-out"
            )
        return fitting[0]

    def _rows(self, projection: str, tensor: TensorSpec, axis: int) -> slice:
        assert self._model is not None
        total = tensor.shape[1 + axis] if len(tensor.shape) > 1 + axis else 0
        how = gate_up_of(self._model.model_type) if self.gate_up == "auto" else self.gate_up
        if how is None:
            raise Unsupported(
                f"no architecture file names model_type {self._model.model_type!r}, so whether gate and up are halves "
                f"of {tensor.name} or alternate is not known: say {self.name} {{gate_up: halves}} or interleaved"
            )
        self._check_cut(tensor, total, how)
        first = projection == "gate"
        if how == "interleaved":
            return slice(0 if first else 1, None, 2)
        return slice(0, total // 2) if first else slice(total // 2, None)

    def _check_cut(self, tensor: TensorSpec, total: int, how: str) -> None:
        """Refuses what one cut cannot part: scales of blocks that hold rows of gate and of up."""
        assert self._model is not None
        size = self._model.expert_size
        if total == 2 * size:
            return
        block = self._block[0] if isinstance(self._block, list) and self._block else 0
        if not isinstance(block, int) or block < 1:  # not announced: the grid tells, if it divides evenly
            block = 2 * size // total if total and 2 * size % total == 0 else 0
        if how == "interleaved" or not block or size % block or total != 2 * (size // block):
            raise Unsupported(
                f"{tensor} has scales of blocks that hold rows of gate and of up: put moe-to-bf16 before {self.name}"
            )


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [SplitExperts]
