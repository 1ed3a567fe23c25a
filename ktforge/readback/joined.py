"""Experts that the source had in one tensor, put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from ktforge.contract.tensors import BF16, FusedWeight, TensorSpec


@dataclass(frozen=True)
class Joined:
    """A fused weight [E, rows, columns]: ``members`` are each expert's weights in it, in the order of ``how``."""

    spec: TensorSpec
    how: FusedWeight
    members: tuple[tuple[TensorSpec, ...], ...]

    def experts(self, spec: TensorSpec) -> range:
        """Which ones are in ``spec``, which is this weight or some rows of its first axis."""
        first = (spec.offset - self.spec.offset) // max(1, self.spec.nbytes // len(self.members))
        return range(first, first + spec.shape[0])

    def place(self, number: int, weight: np.ndarray, out: np.ndarray) -> None:
        """Puts the ``number``-th member of an expert into ``out``, the expert's rows of the fused weight."""
        whole = out.T if self.how.transposed else out
        if self.how.interleaved:
            whole[number :: len(self.how.projections)] = weight
        else:
            whole[number * len(weight) : (number + 1) * len(weight)] = weight


def joined_weights(
    known: Mapping[str, Any], names: Mapping[str, Mapping[str, str]], singles: Mapping[str, TensorSpec]
) -> Iterator[Joined]:
    """The fused weights of a manifest, where all their members are there in BF16.

    ``known``: layer → name of a fused weight → a :class:`FusedWeight` as plain data. ``names``: layer → role → name of
    an expert's weight, with ``{expert}`` for its number. ``singles``: the weights that there are, by name.
    """
    for layer, weights in known.items():
        for name, data in weights.items() if isinstance(weights, dict) else ():
            how = _how(data)
            patterns = [names.get(layer, {}).get(f"{p}.weight", "") for p in how.projections] if how else []
            if how is None or not all("{expert}" in pattern for pattern in patterns):
                continue
            members = []
            for number in count():
                found = [singles.get(pattern.replace("{expert}", str(number))) for pattern in patterns]
                if not all(found):
                    break
                members.append(tuple(spec for spec in found if spec is not None))
            if not members or any(t.dtype != BF16 or t.shape != members[0][0].shape for m in members for t in m):
                continue
            rows, columns = members[0][0].shape
            shape = (len(patterns) * rows, columns)
            spec = TensorSpec(name, BF16, (len(members), *(shape[::-1] if how.transposed else shape)))
            yield Joined(spec, how, tuple(members))


def _how(data: Any) -> FusedWeight | None:
    """What a manifest, which may be damaged, says of a fused weight."""
    if not isinstance(data, dict):
        return None
    projections = data.get("projections")
    if not isinstance(projections, list) or not all(isinstance(p, str) for p in projections):
        return None
    return FusedWeight(tuple(projections), data.get("interleaved") is True, data.get("transposed") is True)
