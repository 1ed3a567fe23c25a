"""What tensors alone say of a model whose config.json cannot be used, so that its problems and theirs come together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktforge.contract.plan import ModelConfig
from ktforge.contract.tensors import TensorSpec
from ktforge.errors import CheckpointError
from ktforge.model.architectures import architectures
from ktforge.model.config import COUNT_LIMIT, EXPERT_COUNT, NESTED, fields_of, read_model_config
from ktforge.model.names import canonical
from ktforge.model.units import units_of


def tensor_problems(config: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> tuple[str, ...]:
    """What is wrong with the experts among ``tensors``, by what config.json says as far as it can be used, and else by
    the highest numbers in their names."""
    found = _experts(tensors)
    if not found:
        return ()
    highest = min(max(found.values()), COUNT_LIMIT)
    layers = 1 + max(found)
    presumed, announced = _completed(config, layers, highest)
    try:
        model = read_model_config(presumed)
    except CheckpointError:  # not to be made sense of at all: the names alone count
        model, announced = ModelConfig("", layers, 1, highest, 1, frozenset(found)), False
    try:
        lines = units_of(tensors, model).problems.lines()
    except CheckpointError as error:
        lines = error.problems
    return lines if announced else tuple(p.replace("config.json announces", "the names speak of") for p in lines)


def _experts(tensors: Sequence[TensorSpec]) -> dict[int, int]:
    """Layer → how many experts the names and fused tensors in it speak of."""
    found: dict[int, int] = {}
    for architecture in architectures():
        for spec, place in zip(tensors, architecture.places(canonical(s.name) for s in tensors), strict=True):
            if place is not None:
                layer, expert, _ = place
                count = expert + 1 if expert is not None else spec.shape[0] if spec.shape else 0
                found[layer] = max(found.get(layer, 0), count)
        if found:
            return found
    return found


def _completed(config: Mapping[str, Any], layers: int, experts: int) -> tuple[dict[str, Any], bool]:
    """``config`` with what is missing of it, or contradicts itself, by the tensors' numbers; and whether the number of
    experts is its own."""
    made = {k: v for k, v in fields_of(config).items() if k not in NESTED}
    said = {made[n] for n in EXPERT_COUNT if type(made.get(n)) is int}
    announced = len(said) == 1 and said != {0}
    if not announced:
        made = {k: v for k, v in made.items() if k not in EXPERT_COUNT} | {EXPERT_COUNT[0]: experts}
    sizes = {"num_hidden_layers": layers, "hidden_size": 1, "moe_intermediate_size": 1}
    return made | {k: v for k, v in sizes.items() if type(made.get(k)) is not int}, announced
