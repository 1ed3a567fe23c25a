"""Names and shapes come from strangers' files: what no model has is refused before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from ktforge.errors import CheckpointError
from ktforge.tensors import TensorSpec

#: The longest tensor name in use has about 100 characters, and no tensor more than 5 dimensions.
NAME_LIMIT = 500
DIMENSION_LIMIT = 16


def printable(text: str) -> str:
    """``text`` with everything spelled out that would steer a terminal or begin a line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raises CheckpointError with a sentence for each tensor, 20 at most, whose name or shape makes no sense.

    Raises TypeError for a loader's mistake.
    """
    shapes = [spec.shape for spec in specs]
    if not set(map(type, shapes)) <= {tuple}:
        raise TypeError("the shape of a TensorSpec is a tuple")
    if _sound([spec.name for spec in specs]) and max(map(len, shapes), default=0) <= DIMENSION_LIMIT:
        return
    problems = []
    for spec in specs:
        where = f"{spec.file}: " if spec.file is not None else ""
        name = spec.name
        if not name or len(name) > NAME_LIMIT:
            problems.append(
                f"{where}a tensor has a name of {len(name):,} characters ({name[:40]!r}): the file is broken"
            )
        elif not _sound([name]):
            problems.append(f"{where}{name!r} is no tensor's name: rename it, or get the file from someone you trust")
        elif len(spec.shape) > DIMENSION_LIMIT:
            problems.append(f"{where}{name} has {len(spec.shape):,} dimensions: the file is broken")
    raise CheckpointError(*problems[:20])


def _sound(names: Sequence[str]) -> bool:
    """All in one go: one by one takes ten times as long, and there are 100,000."""
    text = " ".join(names)
    lengths = set(map(len, names))
    return text.isprintable() and "/" not in text and ".." not in text and lengths <= set(range(1, NAME_LIMIT + 1))
