"""Measured things side by side: one after the other in every round, so that whatever else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


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


def median_ratios(
    one: Callable[[], object], other: Callable[[], object], rounds: int, *clocks: Callable[[], float]
) -> list[float]:
    """The time of ``one`` by that of ``other``, on each clock: the median of rounds in which one runs right after the
    other. For what needs more cores than the other: the best of many rounds finds one core free sooner than
    two."""
    found = []
    for _ in range(rounds):
        spent = []
        for run in (one, other):
            started = [clock() for clock in clocks]
            run()
            spent.append([clock() - start for clock, start in zip(clocks, started, strict=True)])
        found.append([mine / others for mine, others in zip(*spent, strict=True)])
    return [median(column) for column in zip(*found, strict=True)]


def ratio_row(what: str, ratio: float, goal: float, unit: str, at_most: bool = False) -> Row:
    """A row for a ratio with a goal."""
    reached = ratio <= goal if at_most else ratio >= goal
    return Row(what, f"{ratio:.2f} × {unit}", f"{'≤' if at_most else '≥'} {goal:.2f} ×", reached)
