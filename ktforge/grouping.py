"""Tensor names → units. What a family calls its experts is data, in data/architectures/*.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict
from ruamel.yaml import YAML

from ktforge.errors import CheckpointError, Problems
from ktforge.modelconfig import ModelConfig
from ktforge.tensors import TensorSpec, UnitSpec, dtype_name

PROJECTIONS = ("gate", "up", "down")
#: A weight that is no expert's forms one unit with the tensor of this name beside it.
SCALE_SUFFIX = ".weight_scale_inv"
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d{1,6})\.")


class Architecture(BaseModel):
    """One file of data/architectures."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model_types: tuple[str, ...]
    experts: str
    projections: dict[str, str]

    def pattern(self) -> re.Pattern[str]:
        names = "|".join(re.escape(n) for n in self.projections.values())
        regex = re.escape(self.experts)
        for key, group in {
            "layer": r"(?P<layer>\d{1,6})",
            "expert": r"(?P<expert>\d{1,6})",
            "projection": f"(?P<projection>{names})",
            "parameter": r"(?P<parameter>\w+)",
        }.items():
            regex = regex.replace(re.escape("{" + key + "}"), group)
        return re.compile(regex)


@cache
def architectures() -> tuple[Architecture, ...]:
    """All known naming schemes, in order of file name."""
    folder = files("ktforge") / "data" / "architectures"
    paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return tuple(Architecture.model_validate(YAML(typ="safe").load(p.read_text("utf-8"))) for p in paths)


@dataclass
class Grouping:
    """``experts`` and ``others`` make up the model; ``extra`` is the multi-token-prediction layers, whole.

    ``problems`` are the places where tensors and config.json disagree.
    """

    experts: list[UnitSpec] = field(default_factory=list)
    others: list[UnitSpec] = field(default_factory=list)
    extra: list[UnitSpec] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)

    def ordered(self, with_extra: bool) -> list[UnitSpec]:
        """All units, layer by layer: what belongs to no layer first, a layer's experts last."""
        units = [*self.others, *self.experts, *(self.extra if with_extra else ())]
        return sorted(units, key=lambda u: (-1 if u.layer is None else u.layer, -1 if u.expert is None else u.expert))


def canonical(name: str) -> str:
    """The name without a multimodal wrapper's ``language_model.``."""
    return name.replace("language_model.", "", 1)


def group(specs: Sequence[TensorSpec], model: ModelConfig) -> Grouping:
    """Groups a checkpoint's tensors into units and checks them against config.json.

    Raises CheckpointError for a dense model and for experts under names that no architecture file knows.
    """
    architecture = _choose(specs, model)
    pattern = architecture.pattern()
    projection_of = {theirs: ours for ours, theirs in architecture.projections.items()}
    experts: dict[tuple[int, int], dict[str, TensorSpec]] = {}
    rest: list[TensorSpec] = []
    for spec in specs:
        match = pattern.fullmatch(canonical(spec.name))
        if match is None:
            rest.append(spec)
            continue
        key = int(match["layer"]), int(match["expert"])
        role = f"{projection_of[match['projection']]}.{match['parameter']}"
        tensors = experts.setdefault(key, {})
        if role in tensors:
            raise CheckpointError(f"{tensors[role].name} and {spec.name} are both {role} of layer {key[0]}")
        tensors[role] = spec

    result = Grouping()
    for (layer, expert), tensors in experts.items():
        name = next(iter(tensors.values())).name
        name = name[: name.index(f".experts.{expert}.")] + f".experts.{expert}"
        ordered = {r: tensors[r] for p in PROJECTIONS for r in tensors if r.startswith(p + ".")}
        unit = UnitSpec(name, ordered, layer, expert)
        (result.experts if layer < model.layers else result.extra).append(unit)
    for unit in _plain_units(rest):
        is_extra = unit.name.startswith("mtp.") or (unit.layer is not None and unit.layer >= model.layers)
        (result.extra if is_extra else result.others).append(unit)
    _check_complete(result, model)
    return result


def _choose(specs: Sequence[TensorSpec], model: ModelConfig) -> Architecture:
    """The architecture whose pattern matches, that of the ``model_type`` first."""
    if model.experts == 0:
        kind = f"model_type {model.model_type}" if model.model_type else "no model_type"
        raise CheckpointError(
            f"this is a dense model ({kind}; config.json names no experts): there are no MoE experts to convert"
        )
    candidates = sorted(architectures(), key=lambda a: model.model_type not in a.model_types)
    for architecture in candidates:
        pattern = architecture.pattern()
        if any(pattern.fullmatch(canonical(s.name)) for s in specs):
            return architecture
    similar = next((s.name for s in specs if "expert" in s.name and "shared" not in s.name), None)
    seen = f"; the nearest is {similar}" if similar else ""
    raise CheckpointError(
        f"config.json announces {model.experts} experts (model_type {model.model_type or 'not given'}), but no tensor "
        f"has a known expert name such as {candidates[0].experts}{seen}"
    )


def _plain_units(specs: Iterable[TensorSpec]) -> Iterator[UnitSpec]:
    """Each weight with its scale, if it has one, and every other tensor alone."""
    by_name = {s.name: s for s in specs}
    for name, spec in by_name.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix("_scale_inv") in by_name:
            continue
        tensors = {name.rpartition(".")[2]: spec}
        if name.endswith(".weight") and name + "_scale_inv" in by_name:
            tensors["weight_scale_inv"] = by_name[name + "_scale_inv"]
        layer = _LAYER.match(canonical(name))
        yield UnitSpec(name, tensors, int(layer[1]) if layer else None)


def _check_complete(grouping: Grouping, model: ModelConfig) -> None:
    """A gap would make the runtime drop the rest of a layer in silence, so each is a refusal."""
    problems = grouping.problems
    present: dict[int, set[int]] = {}
    for unit in grouping.experts:
        assert unit.layer is not None and unit.expert is not None
        present.setdefault(unit.layer, set()).add(unit.expert)
        projections = unit.projections()
        missing = [p for p in PROJECTIONS if p not in projections]
        if missing:
            problems.add(f"has no {' and no '.join(missing)} projection", unit.name)
    for layer in sorted(model.moe_layers - present.keys()):
        problems.add(f"layer {layer}: config.json announces {model.experts} experts here, the checkpoint has none")
    for layer in sorted(present):
        if layer not in model.moe_layers:
            problems.add(f"layer {layer}: config.json calls this layer dense, but the checkpoint has experts for it")
        gaps = sorted(set(range(model.experts)) - present[layer])
        beyond = sorted(present[layer] - set(range(model.experts)))
        if gaps:
            problems.add(f"layer {layer}: {_experts(gaps)} missing; config.json announces {model.experts}")
        if beyond:
            problems.add(f"layer {layer}: has {_experts(beyond)}, but config.json announces only {model.experts}")


def _experts(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"expert{'s' if len(numbers) > 1 else ''} {shown}"


def check_shapes(unit: UnitSpec, model: ModelConfig) -> Iterator[str]:
    """What is wrong with the weights of an expert that is about to be quantised or written."""
    expected = {
        "gate": (model.expert_size, model.hidden),
        "up": (model.expert_size, model.hidden),
        "down": (model.hidden, model.expert_size),
    }
    for projection, tensors in unit.projections().items():
        weight = tensors.get("weight")
        if weight is not None and weight.shape != expected[projection]:
            yield (
                f"{projection} is {dtype_name(weight.dtype)} {list(weight.shape)}, but config.json says "
                f"{list(expected[projection])} (hidden size {model.hidden}, expert size {model.expert_size})"
            )
