"""What the codes and scales of quantised weights look like."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Self

import numpy as np

from ktforge.contract.tensors import QuantPart, QuantSpec

#: Codes that are looked at a time, for the cache.
BAND = 1 << 20


@dataclass(frozen=True)
class Codes:
    """``zero``, at the ``ends`` of the range and at its very ``lowest`` end (-8 of INT4, -128 of INT8) are so many of
    ``codes``; of ``scales``, so many are ``not_finite``, ``negative``, or ``lost``: zero where a code is not."""

    codes: int = 0
    zero: int = 0
    ends: int = 0
    lowest: int = 0
    scales: int = 0
    not_finite: int = 0
    negative: int = 0
    lost: int = 0

    @classmethod
    def of(cls, spec: QuantSpec, part: QuantPart) -> Self:
        """Of one part of a weight."""
        top = (1 << (spec.bits - 1)) - 1
        flat = part.codes.reshape(-1)
        nonzero = ends = lowest = 0
        for start in range(0, flat.size, BAND):
            some = flat[start : start + BAND]
            below = int(np.count_nonzero(some < -top))
            nonzero += int(np.count_nonzero(some))
            ends += below + int(np.count_nonzero(some == top) + np.count_nonzero(some == -top))
            lowest += below
        wrong = _wrong_scales(part)
        return cls(flat.size, flat.size - nonzero, ends, lowest, part.scales.size, *wrong)

    def __add__(self, other: Codes) -> Self:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return type(self)(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Faults:
    """The same of what no sound output has, in a third of the time: ``lowest`` codes and wrong scales."""

    lowest: int
    not_finite: int
    negative: int
    lost: int

    @classmethod
    def of(cls, spec: QuantSpec, part: QuantPart) -> Self:
        """Of one part of a weight."""
        top = (1 << (spec.bits - 1)) - 1
        lowest = np.count_nonzero(part.codes < -top) if part.codes.min(initial=0) < -top else 0
        return cls(int(lowest), *_wrong_scales(part))


def wrong_scales(found: Codes | Faults) -> dict[str, int]:
    """What scales of quantised weights never are → how many are."""
    return {
        "that are NaN or infinite": found.not_finite,
        "below zero": found.negative,
        "of zero for codes that are not": found.lost,
    }


def _wrong_scales(part: QuantPart) -> tuple[int, int, int]:
    scales = part.scales.astype(np.float32)
    not_finite = int(np.count_nonzero(~np.isfinite(scales)))
    return not_finite, int(np.count_nonzero(scales < 0)), _lost(part, scales)


def _lost(part: QuantPart, scales: np.ndarray) -> int:
    """How many scales are zero though a code of theirs stands for something else."""
    size = -(-part.codes.shape[1] // scales.shape[1])
    lost = 0
    for row, group in zip(*np.nonzero(scales == 0), strict=True):
        zero = 0 if part.zeros is None else part.zeros[row, group]
        lost += bool(np.any(part.codes[row, group * size : (group + 1) * size] != zero))
    return lost
