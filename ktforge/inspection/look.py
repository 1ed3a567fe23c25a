"""A checkpoint, opened and grouped, and what could be made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ktforge.contract.registry import Registry
from ktforge.contract.stages import Loader, Preprocessor
from ktforge.contract.tensors import PROJECTIONS
from ktforge.errors import CheckpointError, KtforgeError, UnknownExperts
from ktforge.inspection.trials import Kinds
from ktforge.model.grouping import Grouping, group
from ktforge.model.source import Source, read_source
from ktforge.pipeline.file import build_pipeline
from ktforge.pipeline.pipeline import Pipeline
from ktforge.pipeline.presets import RAWINT4, convert, to_bf16
from ktforge.readback.loader import require_packed
from ktforge.readback.packed import Packed, find_packed

#: An output folder for pipelines that are asked and never run.
_NOWHERE = Path("out")
#: What ``ktforge convert`` can make, by the words of the command line.
CONVERSIONS: Mapping[str, Mapping[str, Any]] = {
    "convert --quant-method int4": {"quantize": "int4", "layout": "kt-amx"},
    "convert --quant-method int8": {"quantize": "int8", "layout": "kt-amx"},
    "convert --quant-method rawint4": RAWINT4,
    "convert --quant-method int4 --layout compressed-tensors": {"quantize": "int4", "layout": "compressed-tensors"},
    "convert --quant-method int8 --layout compressed-tensors": {"quantize": "int8", "layout": "compressed-tensors"},
}  # fmt: skip
TO_BF16, DEQUANTIZE = "moe-to-bf16", "dequantize"


@dataclass(frozen=True)  # without slots, for the cached properties
class Look:
    """A checkpoint folder, opened and grouped. ``packed`` is what it holds if its experts have a layout's names."""

    folder: Path
    registry: Registry
    loader: Loader
    source: Source
    grouping: Grouping
    packed: Packed | None = None

    @classmethod
    def at(cls, folder: Path, registry: Registry) -> Look:
        """Raises CheckpointError if the checkpoint cannot be read."""
        loader = registry.build("loader", "auto", {"path": folder})
        source = read_source(loader)
        try:
            return cls(folder, registry, loader, source, group(source.tensors, source.model))
        except UnknownExperts:
            packed = find_packed(loader, registry)
            if packed is None:
                raise
            return cls(folder, registry, loader, source, Grouping(), packed)

    @cached_property
    def kinds(self) -> Kinds:
        return Kinds.of(self.source, self.grouping, self.bf16())

    @cached_property
    def whole(self) -> Kinds:
        """The same without experts that lack a projection, which the grouping says already."""
        experts = [u for u in self.grouping.experts if u.fused or u.projections().keys() == set(PROJECTIONS)]
        return Kinds.of(self.source, replace(self.grouping, experts=experts), self.bf16())

    @cached_property
    def unreadable(self) -> tuple[str, ...]:
        """What nothing can be made of: of all targets, moe-to-bf16 asks the least of a checkpoint."""
        return self.kinds.unreadable(self.bf16())

    def conversion(self, **options: Any) -> Pipeline:
        """The pipeline of ``ktforge convert`` with these options."""
        return build_pipeline(convert(self.folder, _NOWHERE, **options), self.registry, "inspect")

    def bf16(self, preprocess: str = TO_BF16) -> Pipeline:
        """The pipeline that only preprocesses."""
        return build_pipeline(to_bf16(self.folder, _NOWHERE, preprocess), self.registry, "inspect")

    def formats(self) -> Iterator[str]:
        """Names of the preprocessors for any model, without options, that make something else of this one."""
        for entry in self.registry.entries():
            if issubclass(entry.cls, Preprocessor) and not entry.cls.experts_only:
                try:
                    pipeline = self.bf16(entry.cls.name)
                except KtforgeError:  # it needs options
                    continue
                if self.kinds.changed_by(pipeline):
                    yield entry.cls.name


def targets(look: Look) -> dict[str, tuple[str, ...]]:
    """What can be made of an ordinary checkpoint → the reasons why not, as the commands would give them."""
    refusals = look.kinds.refusals
    found = {TO_BF16: refusals(look.bf16())}
    if not look.source.model.experts:
        found |= {preprocess_target(name): refusals(look.bf16(name)) for name in look.formats()}
    found |= {target: refusals(look.conversion(**options)) for target, options in CONVERSIONS.items()}
    try:
        require_packed(look.loader, look.registry, look.source.tensors)
        found[DEQUANTIZE] = ()
    except CheckpointError as refusal:
        found[DEQUANTIZE] = refusal.problems
    return found


def preprocess_target(name: str) -> str:
    """A target that is no command: a pipeline file with this preprocessor alone."""
    return f"preprocess: [{{use: {name}}}]"
