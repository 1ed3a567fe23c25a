"""What a checkpoint is, what can be made of it, and what is wrong with it, from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktforge.checkpoint import WEIGHT_SUFFIXES
from ktforge.config import build_pipeline
from ktforge.errors import Problems, Unsupported
from ktforge.grouping import group
from ktforge.modelconfig import ModelConfig
from ktforge.pipeline import Pipeline
from ktforge.registry import Registry
from ktforge.rules import Targets
from ktforge.source import Source, read_source
from ktforge.stages import Loader
from ktforge.tensors import UnitSpec, dtype_name
from ktforge.unitplan import plan_unit

#: What inspection tries, by the words of the command line.
TARGETS: Mapping[str, Mapping[str, Any]] = {
    "moe-to-bf16": {},
    "convert --quant-method int4": {"quantize": {"use": "int4"}, "layout": {"use": "kt-amx"}},
    "convert --quant-method int8": {"quantize": {"use": "int8"}, "layout": {"use": "kt-amx"}},
}


@dataclass(frozen=True)
class Inspection:
    """A checkpoint as its headers and config.json describe it.

    ``expert_storage`` and ``other_storage`` count tensors by parameter and dtype (``weight F8_E4M3``). ``targets`` maps
    what can be made to the reasons why not; empty ones say that it can. ``threadpool_count`` is the first usual number
    of NUMA nodes that kt-amx can divide the experts into, None if there is none. Sizes are bytes.
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
    expert_storage: Mapping[str, int]
    other_storage: Mapping[str, int]
    expert_bytes: int
    other_bytes: int
    mtp_bytes: int
    tensors: int
    files: tuple[str, ...]
    not_read: tuple[str, ...]
    targets: Mapping[str, tuple[str, ...]]
    threadpool_count: int | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``."""
        return asdict(self)


def inspect(folder: Path, registry: Registry) -> Inspection:
    """Inspects the checkpoint in ``folder``. Raises CheckpointError if it cannot be read."""
    loader = _pipeline(folder, registry, {}).loader
    source = read_source(loader)
    grouping = group(source.tensors, source.model)
    kinds = _kinds([*grouping.others, *grouping.experts])
    targets = {t: _refusals(_pipeline(folder, registry, stages), source, kinds) for t, stages in TARGETS.items()}
    everywhere = set.intersection(*(set(problems) for problems in targets.values()))
    return Inspection(
        str(folder),
        **_model(source.model),
        fused=any(u.fused for u in grouping.experts),
        quantization=_quantization(source.config),
        expert_storage=_storage(kinds, experts=True),
        other_storage=_storage(kinds, experts=False),
        expert_bytes=sum(u.nbytes * n for u, n in kinds if u.is_expert or u.fused),
        other_bytes=sum(u.nbytes * n for u, n in kinds if not (u.is_expert or u.fused)),
        mtp_bytes=sum(u.nbytes for u in grouping.extra),
        tensors=len(source.tensors),
        files=tuple(_within(f.path, folder) for f in source.files),
        not_read=_not_read(loader, source),
        targets={t: tuple(p for p in problems if p not in everywhere) for t, problems in targets.items()},
        threadpool_count=_fitting(folder, registry, source, kinds),
        problems=(*grouping.problems.lines(), *(p for p in targets["moe-to-bf16"] if p in everywhere)),
    )


def starter(folder: Path, registry: Registry) -> str:
    """A commented pipeline file for the checkpoint in ``folder``. Raises CheckpointError if it cannot be read."""
    seen = inspect(folder, registry)
    layout = seen.threadpool_count
    family = f"{seen.model_type or 'unknown type'}, {seen.experts} experts of {seen.expert_size} x {seen.hidden_size}"
    lines = [
        f"# {family} in {len(seen.moe_layers)} of {seen.layers} layers.",
        f"# Experts are stored as {', '.join(seen.expert_storage)}.",
        *(f"# To mend first: {problem}" for problem in seen.problems),
        "version: 1",
        f"loader: {{use: auto, path: {_quoted(folder)}}}",
        "preprocess:",
    ]
    if seen.fused and layout:
        lines.append("  - {use: split-experts}  # all experts of a layer are in one tensor")
    lines.append("  - {use: moe-to-bf16}  # from any precision; what is BF16 already stays as it is")
    if layout:
        lines += [
            "quantize: {use: int4}  # or int8",
            f"layout: {{use: kt-amx, threadpool_count: {layout}}}  # NUMA nodes that the engine will run on",
        ]
    else:
        reasons = seen.targets["convert --quant-method int4"]
        lines += [f"# No quantize and layout: {reason}" for reason in reasons or ("see above",)]
    lines.append("writer: {use: safetensors, path: out, max_shard_size: 5GB}")
    if seen.mtp_bytes:
        lines.append("# mtp: keep  # multi-token-prediction layers too; by default a layout leaves them out")
    return "\n".join(lines) + "\n"


def _pipeline(folder: Path, registry: Registry, stages: Mapping[str, Any]) -> Pipeline:
    data: dict[str, Any] = {"loader": {"use": "auto", "path": str(folder)}, **stages}
    split = [{"use": "split-experts"}] if "layout" in stages else []
    data["preprocess"] = [*split, {"use": "moe-to-bf16"}]
    data["writer"] = {"use": "safetensors", "path": "out"}
    return build_pipeline(data, registry, "inspect")


def _kinds(units: Iterable[UnitSpec]) -> list[tuple[UnitSpec, int]]:
    """One unit for all that store the same things in the same shapes, and how many they are.

    A checkpoint has 20,000 experts of one kind; what can be made of one can be made of all.
    """
    first: dict[object, UnitSpec] = {}
    counts: Counter[object] = Counter()
    for unit in units:
        kind = (unit.is_expert, unit.fused, *((r, t.dtype.num, t.shape) for r, t in unit.tensors.items()))
        first.setdefault(kind, unit)
        counts[kind] += 1
    return [(unit, counts[kind]) for kind, unit in first.items()]


def _refusals(pipeline: Pipeline, source: Source, kinds: Sequence[tuple[UnitSpec, int]]) -> tuple[str, ...]:
    problems = Problems()
    bound = pipeline.bound(source.config)
    targets = Targets(bound.quantize, bound.rules, dense=source.model.experts == 0)
    for unit, count in kinds:
        try:
            plan_unit(bound, unit, source.model, targets)
        except Unsupported as refusal:
            for problem in refusal.problems:
                for _ in range(count):  # that it says how many they are
                    problems.add(unit.shorten(problem), unit.name)
    return problems.lines()


def _fitting(folder: Path, registry: Registry, source: Source, kinds: Sequence[tuple[UnitSpec, int]]) -> int | None:
    for count in (2, 1, 4, 8):
        stages = {"quantize": {"use": "int4"}, "layout": {"use": "kt-amx", "threadpool_count": count}}
        if not _refusals(_pipeline(folder, registry, stages), source, kinds):
            return count
    return None


def _model(model: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": model.model_type, "layers": model.layers, "moe_layers": tuple(sorted(model.moe_layers)),
        "experts": model.experts, "hidden_size": model.hidden, "expert_size": model.expert_size,
    }  # fmt: skip


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says about quantisation, without the long lists of modules."""
    for level in (config, config.get("text_config")):
        if isinstance(level, Mapping) and isinstance(level.get("quantization_config"), Mapping):
            found = level["quantization_config"]
            return {k: v for k, v in found.items() if isinstance(v, str | int | float) or k == "weight_block_size"}
    return {}


def _storage(kinds: Iterable[tuple[UnitSpec, int]], *, experts: bool) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for unit, count in kinds:
        if (unit.is_expert or unit.fused) == experts:
            for role, tensor in unit.tensors.items():
                counts[f"{role.rpartition('.')[2]} {dtype_name(tensor.dtype)}"] += count
    return dict(counts.most_common())


def _not_read(loader: Loader, source: Source) -> tuple[str, ...]:
    folder = loader.folder()
    if folder is None:
        return ()
    read = {f.path for f in source.files}
    weights = (p for p in folder.rglob("*") if p.suffix in WEIGHT_SUFFIXES and p not in read)
    return tuple(_within(p, folder) for p in sorted(weights))


def _within(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _quoted(path: Path) -> str:
    """A path as YAML takes it within braces."""
    return "'" + str(path).replace("'", "''") + "'"
