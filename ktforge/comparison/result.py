"""What a comparison found, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ktforge.contract.tensors import PROJECTIONS
from ktforge.measure.codes import Codes
from ktforge.measure.weights import Measures


@dataclass(frozen=True)
class Compared:
    """A tensor of both sides: ``layer``, ``expert`` and ``role`` (``gate.weight``) are of an expert's, else None.
    ``codes`` are those of the converted side, None if it is not packed."""

    name: str
    layer: int | None
    expert: int | None
    role: str | None
    measures: Measures
    codes: Codes | None = None


@dataclass(frozen=True)
class Comparison:
    """``original`` and ``converted`` are the folders. ``problems`` are what is wrong, a sentence each, none if all is
    well; ``notes`` what to know beside. ``experts`` are the projections of experts, ``others`` the other tensors that
    were looked at; ``sample`` is the fraction of all that was asked for. ``identical``: what is stored is equal byte
    for byte, so that nothing was left to measure."""

    original: str
    converted: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    experts: tuple[Compared, ...]
    others: tuple[Compared, ...]
    sample: float
    identical: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @cached_property
    def projections(self) -> Mapping[str, Measures]:
        """Projection → its measures over all experts."""
        found: dict[str, Measures] = {}
        for tensor in self.experts:
            projection = str(tensor.role).partition(".")[0]
            found[projection] = found.get(projection, Measures()) + tensor.measures
        return {p: found[p] for p in PROJECTIONS if p in found}

    @cached_property
    def codes(self) -> Codes | None:
        """Of all experts; None if the converted side is not packed."""
        found = [tensor.codes for tensor in self.experts if tensor.codes is not None]
        return sum(found[1:], found[0]) if found else None

    def worst(self, count: int = 5) -> Sequence[Compared]:
        """The projections of experts with the largest relative errors, the worst first."""
        return sorted(self.experts, key=lambda t: -t.measures.relative_error)[:count]

    def table(self) -> Iterator[dict[str, Any]]:
        """A row for each projection of an expert, of plain numbers: ``pandas.DataFrame(comparison.table())``."""
        for tensor in self.experts:
            row: dict[str, Any] = {
                "name": tensor.name,
                "layer": tensor.layer,
                "expert": tensor.expert,
                "role": tensor.role,
            }
            measured = tensor.measures
            row |= {
                "weights": measured.weights, "relative_error": measured.relative_error, "sqnr": measured.sqnr,
                "cosine": measured.cosine, "largest_error": measured.largest,
            }  # fmt: skip
            yield {**row, **({} if tensor.codes is None else asdict(tensor.codes))}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for ``--json``; what is infinite there is null."""
        rows = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()}
            for r in self.table()
        ]
        return {
            "original": self.original, "converted": self.converted, "ok": self.ok, "problems": list(self.problems),
            "notes": list(self.notes), "sample": self.sample, "identical": self.identical, "experts": rows,
            "others": [{"name": t.name, "relative_error": t.measures.relative_error} for t in self.others],
        }  # fmt: skip
