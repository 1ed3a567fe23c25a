"""How far a converted weight is from the original, in sums that add up over rows, tensors and layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from ktforge import native
from ktforge.contract.tensors import BF16, DTYPES, F32

#: Weights other than bf16 that are compared at a time: 2 MB of float64.
BAND = 1 << 18
#: dtypes of numbers that are weights; of all others, only the bytes can be compared.
FLOATS = (BF16, F32, DTYPES["F16"], DTYPES["F64"])


@dataclass(frozen=True)
class Measures:
    """``original`` and ``converted`` are the sums of their squares over so many ``weights``, ``product`` that of one
    times the other, ``square`` that of the difference squared; ``largest`` is its largest magnitude."""

    weights: int = 0
    original: float = 0.0
    converted: float = 0.0
    product: float = 0.0
    square: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, original: np.ndarray, converted: np.ndarray) -> Self:
        """Of two arrays of one shape, whose dtypes are among :data:`FLOATS`."""
        if original.dtype == converted.dtype == BF16:
            found = native.difference(np.ascontiguousarray(original), np.ascontiguousarray(converted))
            return cls(original.size, found.first, found.second, found.product, found.square, found.largest)
        total = cls()
        one, other = original.reshape(-1), converted.reshape(-1)
        for start in range(0, one.size, BAND):
            x, y = (a[start : start + BAND].astype(np.float64) for a in (one, other))
            apart = x - y
            sums = (float(x @ x), float(y @ y), float(x @ y), float(apart @ apart))
            total += cls(x.size, *sums, float(np.max(np.abs(apart))))
        return total

    def __add__(self, other: Measures) -> Self:
        return type(self)(
            self.weights + other.weights, self.original + other.original, self.converted + other.converted,
            self.product + other.product, self.square + other.square, max(self.largest, other.largest),
        )  # fmt: skip

    @property
    def finite(self) -> bool:
        """Whether no weight of either is NaN or infinite."""
        return math.isfinite(self.original + self.converted)

    @property
    def relative_error(self) -> float:
        """The Frobenius norm of the difference over that of the original; infinite for a difference from nothing."""
        if self.square == 0:
            return 0.0
        return math.sqrt(self.square / self.original) if self.original else math.inf

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise in dB: 20 are a tenth of relative error. Infinite where nothing changed."""
        error = self.relative_error
        return -20 * math.log10(error) if error and not math.isinf(error) else math.inf if not error else -math.inf

    @property
    def cosine(self) -> float:
        """Of the angle between the two; 1 for the same direction, 0 for nothing in common. 1 where both are zeros."""
        norms = math.sqrt(self.original) * math.sqrt(self.converted)
        return self.product / norms if norms else float(self.original == self.converted)
