"""What is wrong with weights that have little in common: the mix-up that explains it, by its name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ktforge.comparison.side import Key, Side
from ktforge.measure.weights import Measures

#: Cosines: what quantisation to any number of bits leaves is above the one, what is another weight below the other.
ALIKE, STRANGE = 0.9, 0.5


def cause(original: Side, converted: Side, key: tuple[int, int, str]) -> str:
    """Why the weight at ``key`` is so far off, with a mend where there is one."""
    _, _, role = key
    weight, _ = original.weight(key)
    for other, what in _suspects(original, converted, key):
        if other in converted.places and _alike(weight, converted.weight(other)[0]):
            return f"{role} is found {what}: convert it again"
    there, _ = converted.weight(key)
    if _parts_exchanged(weight, there, role, converted):
        return f"{role} has the parts of its NUMA nodes exchanged: convert it again"
    if weight.ndim == 2 and weight.shape[0] == weight.shape[1] and _alike(weight, np.ascontiguousarray(there.T)):
        return f"{role} is transposed: convert it again, with --expert-order if the original's experts are fused"
    return (
        f"{role} has nothing in common with the original's: {converted.folder} was made from another checkpoint, or is "
        "damaged"
    )


def _suspects(original: Side, converted: Side, key: tuple[int, int, str]) -> Iterator[tuple[Key, str]]:
    layer, expert, role = key
    swapped = {"gate": "up", "up": "gate"}
    projection, _, parameter = role.partition(".")
    if projection in swapped:
        yield (
            (layer, expert, f"{swapped[projection]}.{parameter}"),
            f"as {swapped[projection]} of {converted.folder}: the two are swapped",
        )
    count = original.plan.model.experts
    for other in sorted(range(count), key=lambda e: abs(e - expert)):
        if other != expert:
            yield (layer, other, role), f"at expert {other} of {converted.folder}: experts are shifted or exchanged"
    for other in sorted(original.plan.model.moe_layers, key=lambda number: abs(number - layer)):
        if other != layer:
            yield (other, expert, role), f"in layer {other} of {converted.folder}: layers are shifted or exchanged"


def _parts_exchanged(weight: np.ndarray, there: np.ndarray, role: str, converted: Side) -> bool:
    """Whether a NUMA node's part of a packed weight is another node's."""
    layout = converted.packed.layout if converted.packed is not None else None
    nodes, axis = layout.numa_nodes if layout is not None else None, 1 if role.startswith("down") else 0
    if not nodes or weight.shape[axis] % nodes:
        return False
    first = np.ascontiguousarray(np.split(weight, nodes, axis)[0])
    return any(_alike(first, np.ascontiguousarray(part)) for part in np.split(there, nodes, axis)[1:])


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and Measures.of(one, other).cosine > ALIKE
