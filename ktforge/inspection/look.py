"""A checkpoint, opened and grouped, and what could be made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ktforge.contract.presets import Preset
from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader, Preprocessor
from ktforge.contract.tensors import PROJECTIONS
from ktforge.errors import CheckpointError, ConfigError, KtforgeError, UnknownExperts
from ktforge.inspection.trials import Samples
from ktforge.model.number_format import remarks_of
from ktforge.model.source import Source, read_source
from ktforge.model.units import ModelUnits, units_of
from ktforge.pipeline.file import build_pipeline
from ktforge.pipeline.pipeline import Pipeline
from ktforge.pipeline.presets import convert, to_bf16
from ktforge.readback.loader import require_packed
from ktforge.readback.packed import Packed, find_packed

#: An output folder for pipelines that are asked and never run.
_NOWHERE = Path("out")
TO_BF16, DEQUANTIZE = "moe-to-bf16", "dequantize"


@dataclass(frozen=True)  # without slots, for the cached properties
class Look:
    """A checkpoint folder, opened and grouped. ``packed`` is what it holds if its experts have a layout's names."""

    folder: Path
    registry: Registry
    loader: Loader
    source: Source
    units: ModelUnits
    packed: Packed | None = None
    follow_links: bool = False

    @classmethod
    def at(cls, folder: Path, registry: Registry, *, follow_links: bool = False) -> Look:
        """Raises CheckpointError if the checkpoint cannot be read."""
        loader = registry.build("loader", "auto", {"path": folder, "follow_links": follow_links or None})
        source = read_source(loader)
        try:
            units = units_of(source.tensors, source.model)
            look = cls(folder, registry, loader, source, units, follow_links=follow_links)
            # A layout may leave experts their names, with parameters of its own.
            return replace(look, packed=find_packed(loader, registry, source.tensors) if look.unreadable else None)
        except UnknownExperts:
            packed = find_packed(loader, registry)
            if packed is None:
                raise
            return cls(folder, registry, loader, source, ModelUnits(), packed, follow_links)

    @cached_property
    def samples(self) -> Samples:
        return Samples.of(self.source, self.units, self.bf16())

    @cached_property
    def whole(self) -> Samples:
        """The same without experts that lack a projection, which is said already."""
        experts = [u for u in self.units.experts if u.fused or u.projections().keys() == set(PROJECTIONS)]
        return Samples.of(self.source, replace(self.units, experts=experts), self.bf16())

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """What nothing can be made of: of all targets, moe-to-bf16 asks the least of a checkpoint."""
        return self.samples.unreadable(self.bf16())

    def conversion(self, preset: Preset, layout: Mapping[str, Any] | None = None) -> Pipeline:
        """The pipeline of ``ktforge convert`` for a preset, with these options of its layout."""
        data = convert(self.folder, _NOWHERE, preset, layout=layout, follow_links=self.follow_links)
        return build_pipeline(data, self.registry, "inspect")

    def bf16(self, preprocess: str = TO_BF16) -> Pipeline:
        """The pipeline that only preprocesses."""
        data = to_bf16(self.folder, _NOWHERE, preprocess, follow_links=self.follow_links)
        return build_pipeline(data, self.registry, "inspect")

    def remarks(self) -> Iterator[str]:
        """What the installed number formats say of the experts' data."""
        return remarks_of(self.registry, self.loader, self.source.model, self.units.experts)

    def formats(self) -> Iterator[str]:
        """Names of the preprocessors for any model, without options, that make something else of this one."""
        for entry in self.registry.entries():
            if issubclass(entry.cls, Preprocessor) and not entry.cls.experts_only:
                try:
                    pipeline = self.bf16(entry.cls.name)
                except KtforgeError:  # it needs options
                    continue
                if self.samples.changed_by(pipeline):
                    yield entry.cls.name


def targets(look: Look) -> dict[str, tuple[str, ...]]:
    """What can be made of an ordinary checkpoint → the reasons why not, as the commands would give them."""
    refusals = look.samples.refusals
    found = {TO_BF16: refusals(look.bf16())}
    if not look.source.model.experts:
        found |= {preprocess_target(name): refusals(look.bf16(name)) for name in look.formats()}
    found |= {preset.command: _refusals_of(look, preset) for preset in look.registry.presets()}
    try:
        require_packed(look.loader, look.registry, look.source.tensors)
        found[DEQUANTIZE] = ()
    except CheckpointError as refusal:
        found[DEQUANTIZE] = refusal.problems
    return found


def _refusals_of(look: Look, preset: Preset) -> tuple[str, ...]:
    """Why a preset cannot be made, such as for want of a stage that is not installed."""
    try:
        return look.samples.refusals(look.conversion(preset))
    except ConfigError as refusal:
        return refusal.problems


def preprocess_target(name: str) -> str:
    """A target that is no command: a pipeline file with this preprocessor alone."""
    return f"preprocess: [{{use: {name}}}]"
