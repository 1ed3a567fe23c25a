"""What a checkpoint is, what can be made of it, and what is wrong with it, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ktforge.checkpoint import WEIGHT_SUFFIXES, CheckpointFolder
from ktforge.config import build_pipeline
from ktforge.dequantize import packed_loader, require_packed
from ktforge.errors import CheckpointError, KtforgeError, UnknownExperts
from ktforge.grouping import PROJECTIONS, Grouping, group
from ktforge.kinds import Kind, Kinds, kinds_of
from ktforge.modelconfig import ModelConfig
from ktforge.packed import Packed, find_packed, made_from, read_manifest, stated_formats
from ktforge.pipeline import Pipeline
from ktforge.quantization import quantization_config
from ktforge.recipes import RAWINT4_GROUP, convert, to_bf16
from ktforge.registry import Registry
from ktforge.source import Source, read_source
from ktforge.stages import Loader, Preprocessor
from ktforge.tensors import UnitSpec, dtype_name, total_bytes

#: An output folder for pipelines that are asked and never run.
_NOWHERE = Path("out")
#: What ``ktforge convert`` can make, by the words of the command line.
CONVERSIONS: Mapping[str, Mapping[str, Any]] = {
    "convert --quant-method int4": {"quantize": "int4", "layout": "kt-amx"},
    "convert --quant-method int8": {"quantize": "int8", "layout": "kt-amx"},
    "convert --quant-method rawint4": {
        "quantize": "int4", "layout": "compressed-tensors", "group_size": RAWINT4_GROUP,
    },
    "convert --quant-method int4 --layout compressed-tensors": {"quantize": "int4", "layout": "compressed-tensors"},
    "convert --quant-method int8 --layout compressed-tensors": {"quantize": "int8", "layout": "compressed-tensors"},
}  # fmt: skip
TO_BF16, DEQUANTIZE = "moe-to-bf16", "dequantize"


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its headers and config.json describe it.

    ``expert_storage`` and ``other_storage`` count tensors by parameter and dtype (``weight F8_E4M3``); packed experts
    count as their format. ``targets`` maps what can be made to the reasons why not; empty ones say that it can, once
    ``problems`` are mended. ``packed`` is the format of an output that a layout has packed, ``numa_nodes`` how many
    it was made for (None where that makes no difference), ``made_from`` the folder that ktforge made it from, and
    ``replacement`` what an unfinished run would put in its place. Sizes are bytes.
    """

    folder: str
    model_type: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    hidden_size: int
    expert_size: int
    fused: bool
    quantization: Mapping[str, Any]
    packed: str | None
    numa_nodes: int | None
    made_from: str | None
    replacement: str | None
    expert_storage: Mapping[str, int]
    other_storage: Mapping[str, int]
    expert_bytes: int
    other_bytes: int
    mtp_bytes: int
    tensors: int
    files: tuple[str, ...]
    not_read: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether nothing is wrong and anything can be made of it."""
        return not self.problems and not all(self.targets.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self)


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


def describe(look: Look) -> Inspection:
    """What a look shows."""
    return _of_packed(look, look.packed) if look.packed else _of_ordinary(look)


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


def _of_ordinary(look: Look) -> Inspection:
    grouping, unreadable, manifest = look.grouping, look.unreadable, read_manifest(look.folder)
    return Inspection(
        **_common(look),
        fused=any(u.fused for u in grouping.experts),
        packed=", ".join(stated_formats(manifest)) or None,
        numa_nodes=None,
        made_from=made_from(manifest),
        expert_storage=_storage(look.kinds.units, experts=True),
        other_storage=_storage(look.kinds.units, experts=False),
        expert_bytes=sum(u.nbytes * count for u, count in look.kinds.units if _has_experts(u)),
        other_bytes=sum(u.nbytes * count for u, count in look.kinds.units if not _has_experts(u)),
        mtp_bytes=sum(u.nbytes * count for u, count in look.kinds.extra),
        targets={t: tuple(p for p in problems if p not in unreadable) for t, problems in targets(look).items()},
        problems=(*grouping.problems.lines(), *unreadable),
    )


def _of_packed(look: Look, packed: Packed) -> Inspection:
    """An output that a layout has packed under names of its own, as what reads it back presents it."""
    loader = packed_loader(look.loader, packed)
    grouping = Grouping()
    try:
        presented = read_source(loader)
        grouping = group(presented.tensors, presented.model)
        problems = grouping.problems.lines()
    except CheckpointError as refusal:
        problems = refusal.problems
    form, nodes = packed.form(look.loader, look.source.tensors)
    others = sum(u.nbytes for u in grouping.others)
    sentence = packed.sentence(look.folder, (form, nodes))
    return Inspection(
        **_common(look),
        fused=False,
        packed=form,
        numa_nodes=nodes,
        made_from=packed.made_from,
        expert_storage={form: len(grouping.experts)},
        other_storage=_storage(kinds_of(grouping.others), experts=False),
        expert_bytes=total_bytes(look.source.tensors) - others,
        other_bytes=others,
        mtp_bytes=0,
        targets={**dict.fromkeys((TO_BF16, *CONVERSIONS), (sentence,)), DEQUANTIZE: ()},
        problems=problems,
    )


def _common(look: Look) -> dict[str, Any]:
    """What both kinds of folder have."""
    source = look.source
    return {
        "folder": str(look.folder),
        **_model(source.model),
        "quantization": _quantization(source.config),
        "replacement": CheckpointFolder(look.folder).begun(),
        "tensors": len(source.tensors),
        "files": tuple(_within(f.path, look.folder) for f in source.files),
        "not_read": _not_read(look.folder, source),
    }


def _model(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": model.model_type, "layers": model.layers, "moe_layers": tuple(sorted(model.moe_layers)),
        "experts": model.experts, "hidden_size": model.hidden, "expert_size": model.expert_size,
    }  # fmt: skip


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says about quantisation, without the long lists of modules."""
    found = quantization_config(config)
    return {k: v for k, v in found.items() if isinstance(v, str | int | float) or k == "weight_block_size"}


def _storage(kinds: Iterable[Kind], *, experts: bool) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for unit, count in kinds:
        if _has_experts(unit) == experts:
            for role, tensor in unit.tensors.items():
                counts[f"{role.rpartition('.')[2]} {dtype_name(tensor.dtype)}"] += count
    return dict(counts.most_common())


def _has_experts(unit: UnitSpec) -> bool:
    return unit.is_expert or unit.fused


def _not_read(folder: Path, source: Source) -> tuple[str, ...]:
    read = {f.path for f in source.files}
    found = (p for p in folder.rglob("*") if p.suffix in WEIGHT_SUFFIXES and p not in read)
    weights = (p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return tuple(_within(p, folder) for p in sorted(weights))


def _within(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
