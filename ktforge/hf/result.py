"""What an evaluation found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktforge.hf.scores import Figure


@dataclass(frozen=True)
class Score:
    """A converted checkpoint's predictions beside the original's. ``divergence`` is KL(original ‖ converted) in nats,
    ``agreement`` the share of tokens with the same first choice."""

    folder: str
    perplexity: Figure
    divergence: Figure
    divergence_99: Figure
    agreement: Figure


@dataclass(frozen=True)
class Damage:
    """The error of a layer's output over the residual stream, for each converted checkpoint."""

    layer: int
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Gain:
    """What the predictions are like if the experts of these layers stay as they were."""

    kept: tuple[int, ...]
    score: Score


@dataclass(frozen=True)
class Evaluation:
    """``tokens``: how many were read. ``perplexity``: that of the original. ``layers`` in order."""

    original: str
    texts: tuple[str, ...]
    tokens: int
    activations: str
    perplexity: Figure
    scores: tuple[Score, ...]
    layers: tuple[Damage, ...]
    gains: tuple[Gain, ...]

    def worst(self, converted: int, count: int) -> tuple[Damage, ...]:
        """The layers that hurt the predictions of ``scores[converted]`` most."""
        return tuple(sorted(self.layers, key=lambda d: -d.figures[converted].value)[:count])

    def share(self, converted: int, damage: Damage) -> float:
        """A layer's part of what all layers add."""
        whole = sum(d.figures[converted].value for d in self.layers)
        return damage.figures[converted].value / whole if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: every figure is an object of ``value`` and ``error``."""
        found = _plain(self)
        assert isinstance(found, dict)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Figure):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
