"""One of two checkpoints that are compared: its weights in BF16, whatever form they are stored in."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ktforge.contract.plan import Plan, PlannedUnit, Writer
from ktforge.contract.registry import Registry
from ktforge.contract.tensors import TensorSpec, Unit
from ktforge.measure.codes import Codes
from ktforge.model.names import canonical
from ktforge.model.source import read_source
from ktforge.pipeline.pipeline import Pipeline
from ktforge.pipeline.presets import loader_of, weights_in_bf16
from ktforge.planning.shares import share
from ktforge.readback.loader import PackedLoader, packed_loader, restore
from ktforge.readback.packed import find_packed, read_manifest
from ktforge.running.execute import made_of, release

#: What a tensor is called on both sides: layer, expert and role of an expert's, else its canonical name.
Key = tuple[int, int, str] | str


class Place(NamedTuple):
    """Where a tensor comes from: the ``number``-th unit that is made of ``planned``, and its ``role`` there."""

    planned: PlannedUnit
    number: int
    role: str
    tensor: TensorSpec


@dataclass(frozen=True)
class Side:
    """A checkpoint folder with the plan that reads it as BF16 weights."""

    folder: Path
    plan: Plan
    places: Mapping[Key, Place]
    manifest: Mapping[str, object]
    _last: threading.local = field(default_factory=threading.local, repr=False)

    @classmethod
    def open(cls, folder: Path, registry: Registry, writer: Writer, *, follow_links: bool = False) -> Side:
        """``writer`` is where the plan leads. Raises CheckpointError if the folder cannot be read at all."""
        options = loader_of(folder, follow_links=follow_links)
        inner = registry.build("loader", options.pop("use"), options)
        packed = find_packed(inner, registry)
        loader = packed_loader(inner, packed, one_by_one=True) if packed else inner
        stages = weights_in_bf16(registry, dense=not read_source(loader).model.experts)
        plan = Pipeline(loader=loader, preprocess=stages, writer=writer).plan(registry)
        return cls(folder, plan, dict(_places(plan)), read_manifest(folder))

    @property
    def packed(self) -> PackedLoader | None:
        """What reads it, if a layout has packed it."""
        loader = self.plan.pipeline.loader
        return loader if isinstance(loader, PackedLoader) else None

    def weight(self, key: Key, row: int | None = None, rows: int = 0) -> tuple[np.ndarray, Codes | None]:
        """A tensor, or so many ``rows`` of its first axis from ``row`` on; and its codes if they are packed."""
        place = self.places[key]
        if self.packed is not None and self.packed.is_packed(place.tensor):
            return self._restored(self.packed, place.tensor)
        if row is None:
            return self._made(place).tensors[place.role], None
        loader, source = self.plan.pipeline.loader, place.planned.source.tensors.get(place.role)
        if source == place.tensor and (part := loader.rows(source, row, row + rows)) is not None:
            return loader.read(part), None
        return self._made(place).tensors[place.role][row : row + rows], None

    def release(self, key: Key) -> None:
        """Gives back what was read of a tensor, once nothing that :meth:`weight` gave is looked at any more."""
        self._last.wanted = self._last.unit = None
        release(self.plan.pipeline.loader, self.places[key].planned.source)

    @staticmethod
    def _restored(packed: PackedLoader, spec: TensorSpec) -> tuple[np.ndarray, Codes]:
        weight, codes = np.empty(spec.shape, spec.dtype), Codes()
        for wanted, part in packed.parts(spec):
            restore(wanted, part, wanted.parts[0].of(weight))
            codes += Codes.of(wanted, part)
        return weight, codes

    def _made(self, place: Place) -> Unit:
        """The unit that the tensor is of. A thread keeps the last one that it made: an expert is asked for its
        projections one after the other."""
        wanted = (place.planned.source.name, place.number)
        if getattr(self._last, "wanted", None) != wanted:
            self._last.wanted = None
            recipe, planned = self.plan.pipeline, place.planned
            # The experts of a fused unit are a share each, unless a loader or stage wants all at once.
            split = planned.share_rows == 1 and len(planned.results) == planned.source.first_axis
            part = share(recipe, planned, place.number).planned if split else planned._replace(share_rows=0)
            for number, unit in enumerate(made_of(recipe, part)):
                if split or number == place.number:
                    self._last.unit = unit
                    break
            self._last.wanted = wanted
            release(recipe.loader, part.source)
        return self._last.unit


def _places(plan: Plan) -> Iterator[tuple[Key, Place]]:
    for planned in plan.units:
        for number, results in enumerate(planned.results):
            for result in results:
                for role, tensor in (result.renamed or {}).items():
                    layer, expert = result.unit.layer, result.unit.expert
                    if layer is None or expert is None:
                        key: Key = canonical(tensor.name)
                    else:
                        key = (layer, expert, role)
                    yield key, Place(planned, number, role, tensor)
