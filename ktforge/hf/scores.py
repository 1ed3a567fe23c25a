"""Figures of two models' predictions of the same tokens, each with its standard error."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Figure(NamedTuple):
    """A figure and its standard error, as of independent tokens."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


class Tally:
    """What is known of every token: how well either model foresaw it, and how far their predictions are apart."""

    def __init__(self) -> None:
        self._columns: dict[str, list[torch.Tensor]] = {"original": [], "own": [], "divergence": [], "agreed": []}

    def add(self, original: torch.Tensor, converted: torch.Tensor, targets: torch.Tensor) -> None:
        """Logarithms of probabilities [n, vocabulary] of either model, and the tokens [n] that came."""
        found = {
            "original": -original.gather(1, targets[:, None])[:, 0],
            "own": -converted.gather(1, targets[:, None])[:, 0],
            "divergence": (original.exp() * (original - converted)).sum(dim=1).clamp_min(0),
            "agreed": (original.argmax(dim=1) == converted.argmax(dim=1)).float(),
        }
        for name, column in found.items():
            self._columns[name].append(column.double())

    @property
    def original(self) -> Figure:
        """Perplexity of the original."""
        return _perplexity(self._column("original"))

    @property
    def perplexity(self) -> Figure:
        return _perplexity(self._column("own"))

    @property
    def divergence(self) -> Figure:
        """Mean Kullback-Leibler divergence KL(original ‖ converted) of the predictions, in nats."""
        return mean_of(self._column("divergence"))

    @property
    def divergence_99(self) -> Figure:
        """What the divergence of 99 tokens in 100 is below. Its error is from the ranks that the binomial distribution
        gives the quantile."""
        values = self._column("divergence").sort().values
        count = len(values)
        spread = math.sqrt(count * 0.99 * 0.01)
        low, middle, high = (
            float(values[min(count - 1, max(0, round(rank)))])
            for rank in (0.99 * count - spread, 0.99 * count - 0.5, 0.99 * count + spread)
        )
        return Figure(middle, (high - low) / 2)

    @property
    def agreement(self) -> Figure:
        """The share of tokens for which both have the same first choice."""
        return mean_of(self._column("agreed"))

    def _column(self, name: str) -> torch.Tensor:
        return torch.cat(self._columns[name])


def mean_of(values: torch.Tensor) -> Figure:
    return Figure(float(values.mean()), float(values.std(correction=0)) / math.sqrt(len(values)))


def _perplexity(losses: torch.Tensor) -> Figure:
    mean, error = mean_of(losses)
    return Figure(math.exp(mean), math.exp(mean) * error)
