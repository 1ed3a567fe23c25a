"""Preprocessor ``split-experts``: tensors that hold all experts of a layer become one unit an expert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PrivateAttr

from ktforge import FusedWeight, Preprocessor, TensorSpec, Unit, UnitSpec, Unsupported, hookimpl
from ktforge.contract.plan import ModelConfig
from ktforge.contract.stages import PlanKey, alike
from ktforge.model.architectures import gate_up_of
from ktforge.model.config import quantization_config, read_model_config
from ktforge.model.names import canonical
from ktforge_plugins.preprocess import scales

PROJECTION_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a tensor of one expert lies in a fused one: of expert ``e``, ``rows`` of the axis of outputs.

    ``number``: the expert has one number there, which goes for all its projections. ``block``: a row stands for so many
    rows of the weight, which has ``total``; they are cut from the rows of the weight, each with its number.
    """

    source: str
    rows: slice
    axis: int
    transposed: bool
    number: bool = False
    block: int = 1
    total: int = 0

    def of(self, expert: np.ndarray) -> np.ndarray:
        """What one expert's share ``expert`` holds for this projection, a view where no row is repeated."""
        if self.number:
            return expert.reshape(1)
        if self.block > 1:
            expert = expert.repeat(self.block, axis=self.axis)[: self.total]
        cut = expert[(slice(None),) * self.axis + (self.rows,)]
        return cut.T if self.transposed else cut

    def shape(self, expert: tuple[int, ...]) -> tuple[int, ...]:
        """That of the view: nothing is made of a shape that may be a stranger's."""
        if self.number:
            return (1,)
        count = len(range(self.total if self.block > 1 else expert[self.axis])[self.rows])
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

    def taken_apart(self, unit: UnitSpec) -> Mapping[str, FusedWeight]:
        found: dict[str, FusedWeight] = {}
        for role, cut in self._cuts(unit).items() if unit.fused else ():
            projection, _, parameter = role.partition(".")
            if parameter == "weight":
                name = unit.tensors[cut.source].name
                before = found[name].projections if name in found else ()
                found[name] = FusedWeight((*before, projection), cut.rows.step == 2, cut.transposed)
        return found

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
        transposed = self._transposed(unit)
        cuts = {}
        for ours in ("gate", "up", "down"):
            for role, tensor in unit.tensors.items():
                projection, _, parameter = role.partition(".")
                fused = projection == "gate_up" and ours != "down"
                if projection != ours and not fused:
                    continue
                number = math.prod(tensor.shape[1:]) == 1
                flip = transposed and len(tensor.shape) == 3 and not number  # the weight and what is laid out like it
                cut = _Cut(role, slice(None), 1 if flip else 0, flip, number)
                cuts[f"{ours}.{parameter}"] = self._part(cut, ours, tensor) if fused and not number else cut
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
                f"say --expert-order out-in or --expert-order in-out (in a pipeline file, {self.name} "
                "{order: out-in} or in-out)"
            )
        return fitting[0]

    def _part(self, cut: _Cut, projection: str, tensor: TensorSpec) -> _Cut:
        """``cut`` of a tensor that gate and up share, for one of the two."""
        assert self._model is not None
        total = tensor.shape[1 + cut.axis] if len(tensor.shape) > 1 + cut.axis else 0
        how = gate_up_of(self._model.model_type, canonical(tensor.name)) if self.gate_up == "auto" else self.gate_up
        size, first = self._model.expert_size, projection == "gate"
        if tensor.shape[1:] == (2,) and size > 1:  # one number of each
            return replace(cut, rows=slice(0, 1) if first else slice(1, 2))
        if how is None:
            raise Unsupported(
                f"whether gate and up are halves of {tensor.name} or alternate is not known of model_type "
                f"{self._model.model_type!r}: say --gate-up halves or --gate-up interleaved "
                f"(in a pipeline file, {self.name} {{gate_up: halves}} or interleaved)"
            )
        block = self._rows_of_a_scale(tensor, total)
        if how == "halves" and (block == 1 or (size % block == 0 and total == 2 * (size // block))):
            return replace(cut, rows=slice(0, total // 2) if first else slice(total // 2, None))
        scale = (
            cut.source.rpartition(".")[2] in scales.NAMES
        )  # of floats or exponents, a row of each as good as another
        if block > 1 and tensor.dtype.kind in "iu" and not scale:  # packed numbers
            raise Unsupported(
                f"{tensor} has numbers for blocks that hold rows of gate and of up: put moe-to-bf16 before {self.name} "
                "in a pipeline file, which `ktforge convert … --print-pipeline` writes"
            )
        halves = slice(0, size) if first else slice(size, None)
        rows = halves if how == "halves" else slice(0 if first else 1, None, 2)
        return replace(cut, rows=rows, block=block, total=2 * size)

    def _rows_of_a_scale(self, tensor: TensorSpec, total: int) -> int:
        """How many rows of the weight one of the ``total`` rows of ``tensor`` stands for; 1 for the weight itself."""
        assert self._model is not None
        size = self._model.expert_size
        if total == 2 * size:
            return 1
        block = self._block[0] if isinstance(self._block, list) and self._block else 0
        if not isinstance(block, int) or block < 1:  # not announced: the grid tells, if it divides evenly
            block = 2 * size // total if total and 2 * size % total == 0 else 0
        if not block or total != -(-2 * size // block):
            raise Unsupported(
                f"{tensor} does not fit gate and up of {size} rows each, alone or in blocks of one size: check "
                "moe_intermediate_size and weight_block_size in config.json"
            )
        return block


@hookimpl
def ktforge_preprocessors() -> Iterable[type[Preprocessor]]:
    return [SplitExperts]
