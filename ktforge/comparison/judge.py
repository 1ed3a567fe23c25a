"""What the numbers of a comparison say is wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ktforge.comparison.causes import STRANGE, cause
from ktforge.comparison.result import Compared
from ktforge.comparison.side import Side
from ktforge.errors import Problems
from ktforge.measure.codes import wrong_scales
from ktforge.measure.weights import Measures

#: How many mix-ups are looked into; the rest of a broken checkpoint has the same.
LOOKED_INTO = 3


@dataclass
class Judge:
    """Adds to ``problems``; ``max_error`` is the largest relative error that is well, None for any."""

    one: Side
    other: Side
    max_error: float | None
    problems: Problems
    looked_into: int = 0

    def experts(self, tensors: Iterable[Compared]) -> None:
        for tensor in tensors:
            measures = tensor.measures
            if not measures.finite:
                self.problems.add(f"has NaN or infinity in {self.other.folder}: convert it again", tensor.name)
            elif _is_strange(measures):
                self.problems.add(self._cause(tensor), tensor.name)
            elif self.max_error is not None and measures.relative_error > self.max_error:
                self.problems.add(f"is further than {self.max_error:g} from the original (relative error)", tensor.name)

    def scales(self, tensors: Iterable[Compared]) -> None:
        """Of those whose whole folder was not looked at."""
        for tensor in tensors:
            for wrong, count in wrong_scales(tensor.codes).items() if tensor.codes is not None else ():
                if count:
                    self.problems.add(f"has scales {wrong} in {self.other.folder}: convert it again", tensor.name)

    def others(self, tensors: Iterable[Compared], unequal: Collection[str]) -> None:
        """``unequal`` are the names of those that are no floats and differ."""
        for tensor in tensors:
            if tensor.name in unequal:
                self.problems.add(
                    f"differs between {self.one.folder} and {self.other.folder}: convert it again", tensor.name
                )
            elif not tensor.measures.finite:
                self.problems.add("has NaN or infinity on one side or both", tensor.name)
            elif _is_strange(tensor.measures):
                self.problems.add(
                    f"has little in common with that of {self.other.folder}: convert it again", tensor.name
                )

    def _cause(self, tensor: Compared) -> str:
        layer, expert, role = tensor.layer, tensor.expert, tensor.role
        if self.looked_into >= LOOKED_INTO or layer is None or expert is None or role is None:
            return f"has little in common with that of {self.other.folder}, as others here"
        self.looked_into += 1
        return cause(self.one, self.other, (layer, expert, role))


def _is_strange(measures: Measures) -> bool:
    return measures.cosine < STRANGE and bool(measures.original or measures.converted)
