"""How many threads this machine is for."""

from __future__ import annotations

import os

from ktforge.errors import ConfigError

#: Threads; each has a stack and buffers of its own.
MOST_WORKERS = 1024


def available_cores() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(wanted: int | None) -> int:
    """``wanted`` itself, or for None one a core. Raises ConfigError for a number that no machine has use for."""
    if wanted is None:
        return available_cores()
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MOST_WORKERS:
        raise ConfigError(f"workers is a whole number from 1 to {MOST_WORKERS:,}, not {str(wanted)[:40]}")
    return wanted
