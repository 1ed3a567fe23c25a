"""Tensor names → units. What a family calls its experts is data, in data/architectures/*.yaml."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ktforge.checkpoint.shards import is_mtp_file
from ktforge.contract.plan import ModelConfig
from ktforge.contract.tensors import BF16, CARRIERS, PROJECTIONS, TensorSpec, UnitSpec, dtype_name
from ktforge.errors import Problems, UnknownExperts
from ktforge.model.architectures import Architecture, architectures_of, chosen_architecture, likely_architectures
from ktforge.model.config import COUNT_LIMIT
from ktforge.model.names import all_canonical, canonical, layer_of, of_mtp

FUSED = ("gate_up", *PROJECTIONS)
#: What formats store beside a weight for its sake: scales, zero points, orders of columns, the shape.
COMPANION = re.compile(r"\w*(?:scale|zero)\w*|(?:weight_)?g_idx|weight_shape")
#: What the names of experts begin with whose own are not known.
NAMELESS = "nameless."
_SAME = {projection: projection for projection in PROJECTIONS}
#: Multi-token-prediction heads under names of their own.
_MTP = re.compile(r"(?:^|\.)mtp(?:\.|_)")


@dataclass
class ModelUnits:
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


def units_of(specs: Sequence[TensorSpec], model: ModelConfig) -> ModelUnits:
    """Groups a checkpoint's tensors into units and checks them against config.json.

    A dense model has no experts. Raises UnknownExperts for experts under names that no architecture file knows.
    """
    architecture = _choose(specs, model)
    if architecture is None:
        return ModelUnits(others=list(_plain_units(specs, model.layers)))
    experts: dict[tuple[int, int], dict[str, TensorSpec]] = {}
    fused: dict[int, dict[str, TensorSpec]] = {}
    rest: list[TensorSpec] = []
    result = ModelUnits()
    names = all_canonical([spec.name for spec in specs])
    extra = {i: inside for i, name in enumerate(names) if (inside := of_mtp(name)) is not None}
    places = architecture.places([extra.get(i, name) for i, name in enumerate(names)] if extra else names)
    for i, (spec, place) in enumerate(zip(specs, places, strict=True)):
        if place is None:
            rest.append(spec)
            continue
        layer, expert, role = place
        layer += model.layers if i in extra else 0
        tensors = fused.setdefault(layer, {}) if expert is None else experts.setdefault((layer, expert), {})
        if role in tensors:
            result.problems.add(f"{tensors[role].name} and {spec.name} are both {role} of layer {layer}")
        tensors[role] = spec

    for unit in (*_expert_units(experts), *_fused_units(fused)):
        (result.extra if _is_beyond(unit, model) else result.experts).append(unit)
    for unit in _plain_units(rest, model.layers):
        (result.extra if _is_extra(unit, model) else result.others).append(unit)
    _check_complete(result, model)
    return result


def _expert_units(experts: Mapping[tuple[int, int], dict[str, TensorSpec]]) -> list[UnitSpec]:
    units = []
    for (layer, expert), tensors in experts.items():
        name, number = next(iter(tensors.values())).name, f".experts.{expert}."
        stem = name[: name.index(number) + len(number) - 1]
        units.append(UnitSpec(stem, _ordered(tensors, PROJECTIONS), layer, expert))
    return units


def _fused_units(fused: Mapping[int, dict[str, TensorSpec]]) -> Iterator[UnitSpec]:
    for layer, found in fused.items():
        tensors = _ordered(found, FUSED)
        yield UnitSpec(_common_name(tensors), tensors, layer, fused=True)


def _ordered(tensors: dict[str, TensorSpec], projections: tuple[str, ...]) -> dict[str, TensorSpec]:
    roles = tuple(tensors)
    ordered = _in_order(roles, projections)
    return tensors if ordered == roles else {role: tensors[role] for role in ordered}


@lru_cache
def _in_order(roles: tuple[str, ...], projections: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(r for p in projections for r in roles if r.startswith(f"{p}."))


def _common_name(tensors: dict[str, TensorSpec]) -> str:
    """``model.layers.0.mlp.experts``, of the tensors that lie below it."""
    shortest = min((t.name for t in tensors.values()), key=len)
    return shortest.removesuffix(".weight").rpartition(".")[0]


def _is_beyond(unit: UnitSpec, model: ModelConfig) -> bool:
    return unit.layer is not None and unit.layer >= model.layers


def _is_extra(unit: UnitSpec, model: ModelConfig) -> bool:
    if _is_beyond(unit, model):
        return True
    file = next(iter(unit.tensors.values())).file
    return bool(_MTP.search(unit.name)) or (file is not None and is_mtp_file(file))


def _choose(specs: Sequence[TensorSpec], model: ModelConfig) -> Architecture | None:
    """The architecture whose pattern matches, that of the ``model_type`` first; None for a dense model."""
    if model.experts == 0:
        return None
    found = chosen_architecture(model.model_type, all_canonical([s.name for s in specs]))
    if found is not None:
        return found
    similar = next((s.name for s in specs if "expert" in s.name and "shared" not in s.name), None)
    example = next(likely_architectures(model.model_type)).example
    seen = f"; the nearest is {similar}" if similar else ""
    raise UnknownExperts(
        f"config.json announces {model.experts} experts (model_type {model.model_type or 'not given'}), but no tensor "
        f"has a known expert name such as {example}{seen}: get a copy as transformers saves it "
        "(save_pretrained); if this is one, please report its names"
    )


def _plain_units(specs: Iterable[TensorSpec], layers: int) -> Iterator[UnitSpec]:
    """Each weight with what is stored beside it for its sake, and every other tensor alone."""
    by_stem: dict[str, dict[str, TensorSpec]] = {}
    for spec in specs:
        stem, _, parameter = spec.name.rpartition(".")
        by_stem.setdefault(stem, {})[parameter] = spec
    for parameters in by_stem.values():
        carrier = next((c for c in CARRIERS if c in parameters), None)
        joined = sorted(p for p in parameters if COMPANION.fullmatch(p)) if carrier else []
        for parameter, spec in parameters.items():
            if parameter in joined:
                continue
            tensors = {parameter: spec}
            if parameter == carrier:
                tensors |= {p: parameters[p] for p in joined}
            yield UnitSpec(spec.name, tensors, layer_of(canonical(spec.name), layers))


def _check_complete(units: ModelUnits, model: ModelConfig) -> None:
    """A gap would make the runtime drop the rest of a layer in silence, so each is a refusal."""
    problems = units.problems
    present: defaultdict[int, set[int]] = defaultdict(set)
    gated = any(role.startswith("gate") for unit in units.experts for role in unit.tensors)
    for unit in units.experts:
        assert unit.layer is not None
        if unit.fused:
            found = _fused_experts(unit)
            present[unit.layer].update(found)
            if len(found) == model.experts != unit.experts:  # what is wrong with both counts is said below
                first = next(iter(unit.tensors.values()))
                problems.add(f"{first} has no first axis of {model.experts} experts, as config.json announces")
        else:
            assert unit.expert is not None
            present[unit.layer].add(unit.expert)
        missing = missing_projections(tuple(unit.tensors), unit.fused)
        ungated = missing in (("gate",), ("gate_up",)) and any(role.startswith("up.") for role in unit.tensors)
        if ungated and not gated:
            problems.add(
                "has up and down but no gate projection, as all experts here: kt-amx and the other layouts hold "
                "experts with all three, so a family such as Nemotron-H cannot be converted",
                unit.name,
            )
        elif missing:
            problems.add(f"has no {' and no '.join(missing)} projection", unit.name)
    for layer in sorted(model.moe_layers - present.keys()):
        problems.add(f"layer {layer}: config.json announces {model.experts} experts here, the checkpoint has none")
    for layer in sorted(present):
        if layer not in model.moe_layers:
            problems.add(
                f"layer {layer}: config.json calls this layer dense, but the checkpoint has experts for it: get "
                "both from one place, or correct the field that lists dense layers, such as first_k_dense_replace or "
                "mlp_only_layers"
            )
        gaps = sorted(set(range(model.experts)) - present[layer])
        beyond = sorted(present[layer] - set(range(model.experts)))
        if gaps:
            problems.add(f"layer {layer}: {expert_list(gaps)} missing; config.json announces {model.experts}")
        if beyond:
            problems.add(f"layer {layer}: has {expert_list(beyond)}, but config.json announces only {model.experts}")


@lru_cache
def missing_projections(roles: tuple[str, ...], fused: bool) -> tuple[str, ...]:
    """Projections that an expert with these roles does not have."""
    present = {role.partition(".")[0] for role in roles}
    if not fused:
        return tuple(p for p in PROJECTIONS if p not in present)
    gate_up = () if "gate_up" in present or {"gate", "up"} <= present else ("gate_up",)
    return (*gate_up, *(() if "down" in present else ("down",)))


def _fused_experts(unit: UnitSpec) -> range:
    """The experts that the first axis of all tensors of a fused unit counts; an empty one may claim any number."""
    return range(min((COUNT_LIMIT, *(t.shape[0] for t in unit.tensors.values() if t.shape))))


def expert_list(numbers: Sequence[int]) -> str:
    """``experts 0, 3`` in words, the first five of them."""
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"expert{'s' if len(numbers) > 1 else ''} {shown}"


def expert_unit(model: ModelConfig, layer: int, expert: int) -> UnitSpec:
    """An expert as this model's own checkpoint has it, in BF16: for reading back what lost the names.

    For a ``model_type`` that no architecture file lists, names begin with :data:`NAMELESS`, for the host to exchange.
    """
    architecture = next((a for a in architectures_of(model.model_type) if a.experts), None)
    template, words = f"{NAMELESS}layers.{{layer}}.experts.{{expert}}.{{projection}}.{{parameter}}", _SAME
    if architecture is not None and architecture.experts is not None:
        template, words = architecture.experts, architecture.projections
    tensors = {}
    for projection, shape in expert_shapes(model).items():
        name = template.format(layer=layer, expert=expert, projection=words[projection], parameter="weight")
        tensors[f"{projection}.weight"] = TensorSpec(name, BF16, shape)
    return UnitSpec(name.rpartition(f".{expert}.")[0] + f".{expert}", tensors, layer, expert)


def expert_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Projection → [out, in] of a routed expert's weight."""
    size, hidden = model.expert_size, model.hidden
    return {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}


def check_shapes(unit: UnitSpec, model: ModelConfig) -> Iterator[str]:
    """What is wrong with the weights of an expert that is about to be quantised or written."""
    expected = expert_shapes(model)
    for projection, tensors in unit.projections().items():
        weight = tensors.get("weight")
        if weight is not None and weight.shape != expected[projection]:
            yield (
                f"{projection} is {dtype_name(weight.dtype)} {list(weight.shape)}, but config.json says "
                f"{list(expected[projection])} (hidden size {model.hidden}, expert size {model.expert_size})"
            )
