"""The checkpoints that a model is made of: an original, and what was converted from it."""

from __future__ import annotations

from pathlib import Path

from ktforge.comparison.meter import Meter
from ktforge.comparison.side import Side
from ktforge.contract.registry import Registry
from ktforge.errors import CheckpointError
from ktforge.readback.packed import made_from

#: The roles of an expert's weights that are computed with.
ROLES = ("gate.weight", "up.weight", "down.weight")


def open_side(folder: Path | str, registry: Registry | None = None, *, follow_links: bool = False) -> Side:
    """Raises CheckpointError for a folder that cannot be read, is not whole, or has no experts."""
    side = Side.open(Path(folder), registry or Registry.installed(), Meter(), follow_links=follow_links)
    if side.plan.problems:
        raise CheckpointError(*(f"{side.folder}: {problem}" for problem in side.plan.problems))
    if not experts_of(side):
        raise CheckpointError(
            f"{side.folder} holds no routed experts, and it is only them that ktforge converts: transformers alone "
            "loads this model"
        )
    return side


def experts_of(side: Side) -> dict[int, int]:
    """Layer → how many experts it has."""
    counts: dict[int, int] = {}
    for key in side.places:
        if isinstance(key, tuple) and key[2] == ROLES[0]:
            counts[key[0]] = max(counts.get(key[0], 0), key[1] + 1)
    return counts


def open_original(
    converted: Side, original: Path | str | None, registry: Registry | None = None, *, follow_links: bool = False
) -> Side:
    """The side that has what is not an expert's: the ``original`` if one is given, the converted one if it has all
    itself, else the folder that its manifest names.

    Raises CheckpointError if there is none, or if it is another model.
    """
    if original is None:
        if _is_whole(converted):
            return converted
        named = made_from(converted.manifest)
        if named is None or not Path(named).is_dir():
            said = f"{named}, which its manifest names as its source, is not there" if named else "no manifest says"
            raise CheckpointError(
                f"{converted.folder} holds experts alone, and {said}: say where the original checkpoint is"
            )
        original = named
    side = open_side(original, registry, follow_links=follow_links)
    check_same_model(side, converted)
    return side


def check_same_model(original: Side, converted: Side) -> None:
    """Raises CheckpointError if experts differ in number or shape."""
    mine, theirs = experts_of(original), experts_of(converted)
    for layer in sorted(mine.keys() | theirs.keys()):
        if mine.get(layer) != theirs.get(layer):
            raise CheckpointError(
                f"{converted.folder} was not made of {original.folder}: layer {layer} has {theirs.get(layer, 0)} "
                f"experts here and {mine.get(layer, 0)} there"
            )
        for role in ROLES:
            here, there = (side.places[layer, 0, role].tensor.shape for side in (converted, original))
            if here != there:
                raise CheckpointError(
                    f"{converted.folder} was not made of {original.folder}: {role} of layer {layer} is {list(here)} "
                    f"here and {list(there)} there"
                )


def _is_whole(side: Side) -> bool:
    """Whether there are weights of layers beside the experts'."""
    return any(isinstance(key, str) for key in side.places)
