"""Measured things side by side: one after the other in every round, so that whatever else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table. ``reached`` is None where there is no goal, or nothing to compare with."""

    what: str
    measured: str
    goal: str = ""
    reached: bool | None = None


def best(
    cases: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The shortest time of each case, in the clock's seconds."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            started = clock()
            run()
            times[name].append(clock() - started)
    return {name: min(found) for name, found in times.items()}


def ratio_row(what: str, ratio: float, goal: float, unit: str, at_most: bool = False) -> Row:
    """A row for a ratio with a goal."""
    reached = ratio <= goal if at_most else ratio >= goal
    return Row(what, f"{ratio:.2f} × {unit}", f"{'≤' if at_most else '≥'} {goal:.2f} ×", reached)
