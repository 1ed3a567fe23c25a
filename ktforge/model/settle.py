"""What the tensors settle where config.json has no such field: how many experts, their sizes, which layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktforge.contract.tensors import BF16, DTYPES, F32, TensorSpec
from ktforge.model.architectures import Architecture, Place, chosen_architecture
from ktforge.model.config import (
    COUNT_LIMIT,
    EXPERT_COUNT,
    EXPERT_SIZE,
    HIDDEN_SIZE,
    LAYER_COUNT,
    LAYER_RULES,
    fields_of,
)
from ktforge.model.mtp import COUNTS
from ktforge.model.names import LAYER, canonical

#: A name that speaks of routed experts.
EXPERTS = re.compile(r"(?<!shared_)(?<!shared)experts?(?:[._]|$)")
#: A router within its layer, or what belongs to one: ``gate``, ``router``, ``gate.wg``, ``shared_expert_gate``.
ROUTER = re.compile(r"(?:^|\.)(?:\w*router\w*|(?:moe_|expert_|shared_expert_|switch_)?gate)(?:\.|$)")
#: dtypes of weights whose shape is that of the matrix.
_WHOLE = (BF16, F32, *(DTYPES[d] for d in ("F16", "F64", "F8_E4M3", "F8_E5M2")))


def settled(config: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """The fields that config.json lacks and the tensors leave one answer to, under their usual names."""
    fields = fields_of(config)
    told: dict[str, Any] = {}
    experts = _Experts.of(tensors, str(fields.get("model_type", "")), _missing(fields))
    if not _has(fields, EXPERT_COUNT) and experts is not None and (count := experts.count()):
        told[EXPERT_COUNT[0]] = count
    if not _has(fields, EXPERT_COUNT) and not told:
        return {}
    if not _has(fields, LAYER_COUNT) and not any(fields.get(k) for k in COUNTS):
        told |= {LAYER_COUNT[0]: layers} if (layers := _layers(tensors)) else {}
    if experts is not None and (sizes := experts.sizes()):
        size, hidden = sizes
        told |= {} if _has(fields, HIDDEN_SIZE) else {HIDDEN_SIZE[0]: hidden}
        own = EXPERT_SIZE[:-1]
        if not _has(fields, own) and fields.get(EXPERT_SIZE[-1]) != size:
            told[own[0]] = size
    if not _has(fields, LAYER_RULES) and (sparse := _sparse_layers(tensors)) is not None:
        told["moe_layers"] = sparse
    return told


def speaks_of_experts(tensors: Iterable[TensorSpec]) -> str | None:
    """The first name that does; None for a dense model."""
    return next((s.name for s in tensors if "expert" in s.name and EXPERTS.search(s.name)), None)


def unannounced_experts(name: str) -> str:
    """What to say of experts that neither config.json nor the tensors count; ``name`` is one of their tensors."""
    return (
        f"config.json has no {' or '.join(EXPERT_COUNT)}, but {name} speaks of experts, and the tensors do not tell "
        f'how many a layer has: add "{EXPERT_COUNT[0]}" to config.json'
    )


def _missing(fields: Mapping[str, Any]) -> bool:
    """Whether the experts' own tensors have to be looked at; a large model has 100,000."""
    sizes = _has(fields, HIDDEN_SIZE) and _has(fields, EXPERT_SIZE[:-1])
    return not (_has(fields, EXPERT_COUNT) and sizes)


def _has(fields: Mapping[str, Any], names: Iterable[str]) -> bool:
    return any(name in fields for name in names)


@dataclass(frozen=True)
class _Experts:
    """The tensors of routed experts, by their places."""

    placed: Sequence[tuple[Place, TensorSpec]]

    @classmethod
    def of(cls, tensors: Sequence[TensorSpec], model_type: str, wanted: bool) -> _Experts | None:
        if not wanted:
            return None
        names = [canonical(s.name) for s in tensors]
        architecture: Architecture | None = chosen_architecture(model_type, names)
        if architecture is None:
            return None
        found = zip(architecture.places(names), tensors, strict=True)
        return cls([(place, spec) for place, spec in found if place is not None])

    def count(self) -> int | None:
        """How many experts a layer has, if all layers have the same number without a gap."""
        numbers: dict[int, set[int]] = {}
        for (layer, expert, _), spec in self.placed:
            mine = numbers.setdefault(layer, set())
            if expert is not None:
                mine.add(expert)
            elif spec.shape and spec.shape[0] <= COUNT_LIMIT and 0 not in spec.shape:
                mine.update(range(spec.shape[0]))
        highest = {max(found, default=-1) for found in numbers.values()}
        return 1 + highest.pop() if len(highest) == 1 else None

    def sizes(self) -> tuple[int, int] | None:
        """Expert size and hidden size, if the weights of all layers give the same ones."""
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for (_, expert, role), spec in self.placed:
            projection, _, parameter = role.partition(".")
            if parameter == "weight" and spec.dtype in _WHOLE:
                shapes.setdefault(projection, set()).add(spec.shape if expert is not None else spec.shape[1:])
        if any(len(found) > 1 or len(next(iter(found))) != 2 for found in shapes.values()):
            return None
        one = {projection: next(iter(found)) for projection, found in shapes.items()}
        if "down" not in one or not one.keys() & {"gate_up", "gate", "up"}:
            return None
        down, (rows, columns) = one["down"], one.get("gate_up") or one.get("gate") or one["up"]
        parts = 2 if "gate_up" in one else 1
        answers = set()
        if (rows, columns) == (parts * down[1], down[0]):
            answers.add((down[1], down[0]))
        if (columns, rows) == (parts * down[0], down[1]) and all(e is None for (_, e, _), _ in self.placed[:1]):
            answers.add((down[0], down[1]))
        return answers.pop() if len(answers) == 1 else None


def _layers(tensors: Sequence[TensorSpec]) -> int | None:
    numbers = {int(match[1]) for s in tensors if (match := LAYER.match(canonical(s.name)))}
    return len(numbers) if numbers and len(numbers) == 1 + max(numbers) else None


def _sparse_layers(tensors: Sequence[TensorSpec]) -> list[int] | None:
    """The layers with experts, where others have neither experts nor a router and so are dense; None where all have."""
    with_experts: set[int] = set()
    with_router: set[int] = set()
    stems: set[str] = set()
    layers: set[int] = set()
    for spec in tensors:
        stem = spec.name.partition(".experts.")[0]
        if stem in stems:
            continue
        stems.add(stem)
        match = LAYER.match(canonical(stem + "."))
        if match is None:
            continue
        layers.add(int(match[1]))
        if stem != spec.name or EXPERTS.search(spec.name):
            with_experts.add(int(match[1]))
        if ROUTER.search(canonical(spec.name)[match.end() :]):
            with_router.add(int(match[1]))
    dense = layers - with_experts
    return sorted(with_experts) if with_experts and dense and not dense & with_router else None
