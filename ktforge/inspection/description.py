"""What a look at a checkpoint shows, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktforge.checkpoint.folder import WEIGHT_SUFFIXES, CheckpointFolder
from ktforge.contract.plan import ModelConfig
from ktforge.contract.tensors import UnitSpec, dtype_name, total_bytes
from ktforge.errors import CheckpointError, KtforgeError, Unsupported
from ktforge.inspection.look import DEQUANTIZE, TO_BF16, Look, targets
from ktforge.inspection.trials import Sample, samples_of
from ktforge.model.config import quantization_config
from ktforge.model.source import Source, read_source
from ktforge.model.units import ModelUnits, units_of
from ktforge.readback.loader import packed_loader
from ktforge.readback.packed import Packed, made_from, read_manifest, stated_formats
from ktforge.verification.weights import remarks_on_sample


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its headers and config.json describe it, and a sample of its codes.

    ``expert_storage`` and ``other_storage`` count tensors by parameter and dtype (``weight F8_E4M3``); packed experts
    count as their format. ``targets`` maps what can be made to the reasons why not; empty ones say that it can, once
    ``problems`` are mended. ``packed`` is the format of an output that a layout has packed, ``numa_nodes`` how many
    it was made for (None where that makes no difference), ``made_from`` the folder that ktforge made it from, and
    ``replacement`` what an unfinished run would put in its place. ``remarks`` come of a look at the data of some packed
    weights. Sizes are bytes.
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
    remarks: tuple[str, ...]
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


def describe(look: Look) -> Inspection:
    """What a look shows."""
    return _of_packed(look, look.packed) if look.packed else _of_ordinary(look)


def _of_ordinary(look: Look) -> Inspection:
    units, unreadable, manifest = look.units, look.unreadable, read_manifest(look.folder)
    remarks: list[str] = []
    problems = [*units.problems.lines(), *unreadable]
    try:
        remarks.extend(look.remarks())
    except KtforgeError as refusal:  # of data that cannot be read, or by a plugin: all else can be said
        problems.extend(refusal.problems)
    return Inspection(
        **_common(look),
        fused=any(u.fused for u in units.experts),
        packed=", ".join(stated_formats(manifest)) or None,
        numa_nodes=None,
        made_from=made_from(manifest),
        remarks=tuple(remarks),
        expert_storage=_storage(look.samples.units, experts=True),
        other_storage=_storage(look.samples.units, experts=False),
        expert_bytes=sum(u.nbytes * count for u, count in look.samples.units if _has_experts(u)),
        other_bytes=sum(u.nbytes * count for u, count in look.samples.units if not _has_experts(u)),
        mtp_bytes=sum(u.nbytes * count for u, count in look.samples.extra),
        targets={t: tuple(p for p in problems if p not in unreadable) for t, problems in targets(look).items()},
        problems=tuple(problems),
    )


def _of_packed(look: Look, packed: Packed) -> Inspection:
    """An output that a layout has packed under names of its own, as what reads it back presents it."""
    loader = packed_loader(look.loader, packed)
    units, problems, remarks = ModelUnits(), tuple[str, ...](), tuple[str, ...]()
    try:
        presented = read_source(loader)
        units = units_of(presented.tensors, presented.model)
        problems = units.problems.lines()
        remarks = tuple(remarks_on_sample(loader, presented.tensors))
    except Unsupported:  # it cannot be read back
        pass
    except CheckpointError as refusal:
        problems = refusal.problems
    form, nodes = packed.form(look.loader, look.source.tensors)
    commands = [preset.command for preset in look.registry.presets()]
    others = sum(u.nbytes for u in units.others)
    sentence = packed.sentence(look.folder, (form, nodes))
    return Inspection(
        **_common(look),
        fused=False,
        packed=form,
        numa_nodes=nodes,
        made_from=packed.made_from,
        remarks=remarks,
        expert_storage={form: len(units.experts)},
        other_storage=_storage(samples_of(units.others), experts=False),
        expert_bytes=total_bytes(look.source.tensors) - others,
        other_bytes=others,
        mtp_bytes=0,
        targets={**dict.fromkeys((TO_BF16, *commands), (sentence,)), DEQUANTIZE: ()},
        problems=problems,
    )


def _common(look: Look) -> dict[str, Any]:
    """What an ordinary folder and a packed one have."""
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


def _storage(samples: Iterable[Sample], *, experts: bool) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for unit, count in samples:
        if _has_experts(unit) == experts:
            for role, tensor in unit.tensors.items():
                counts[f"{role.rpartition('.')[2]} {dtype_name(tensor.dtype)}"] += count
    return dict(counts.most_common())


def _has_experts(unit: UnitSpec) -> bool:
    return unit.is_expert or unit.fused


def _not_read(folder: Path, source: Source) -> tuple[str, ...]:
    read = {f.path for f in source.files}
    found = (p for p in CheckpointFolder(folder).all_files() if p.suffix.lower() in WEIGHT_SUFFIXES and p not in read)
    return tuple(_within(p, folder) for p in sorted(found))


def _within(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
