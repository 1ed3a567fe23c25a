"""The observer ``example``: a line a unit in the CSV file that KTFORGE_EXAMPLE_FILE names.

What an observer raises is logged with its name, and the conversion goes on.
"""

from __future__ import annotations

import csv
import logging
import os
import threading

from ktforge import Plan, Summary, UnitSpec, hookimpl

VARIABLE = "KTFORGE_EXAMPLE_FILE"
#: Below ``ktforge``, so that ``-v`` shows what it says.
logger = logging.getLogger("ktforge.example")
_lock = threading.Lock()


@hookimpl
def ktforge_planned(plan: Plan) -> None:
    _add("begun", len(plan.units), plan.source_bytes, "")


@hookimpl
def ktforge_unit_written(spec: UnitSpec, seconds: float) -> None:
    """Called from the worker's thread."""
    _add("written", spec.name, spec.nbytes, f"{seconds:.6f}")


@hookimpl
def ktforge_finished(plan: Plan, summary: Summary) -> None:
    _add("finished", summary.units, summary.output_bytes, f"{summary.seconds:.6f}")
    logger.info("the output is %s, and %s says how it went", summary.folder, os.environ.get(VARIABLE, "nothing"))


@hookimpl
def ktforge_failed(plan: Plan, error: BaseException) -> None:
    _add("failed", type(error).__name__, "", "")


def _add(*row: object) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        with _lock, open(path, "a", newline="") as file:
            csv.writer(file).writerow(row)
