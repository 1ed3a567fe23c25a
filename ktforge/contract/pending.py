"""Tensors of a unit that are made when somebody first asks for them, and never if nobody does.

A preprocessor may deliver them in place of arrays. Stages notice nothing: to read a role of ``unit.tensors`` is to
ask. A fused kernel looks with :func:`pending` and reads what the tensor would have been made of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Pending(Protocol):
    """A tensor that is not made yet, with the dtype and shape that it will have."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def make(self) -> np.ndarray:
        """The tensor."""


class LazyTensors(Mapping[str, np.ndarray]):
    """role → array. ``made`` are at hand, ``pending`` are made at the first access and kept."""

    def __init__(self, made: Mapping[str, np.ndarray], pending: Mapping[str, Pending]) -> None:
        self._made, self._pending = dict(made), dict(pending)
        self._making = threading.Lock()

    def __getitem__(self, role: str) -> np.ndarray:
        if role not in self._made and role in self._pending:
            with self._making:  # parts of a unit may be worked on in several threads
                if role not in self._made:
                    self._made[role] = self._make(role, self._pending[role])
        return self._made[role]

    def __contains__(self, role: object) -> bool:  # the inherited one would make it
        return role in self._made or role in self._pending

    def __iter__(self) -> Iterator[str]:
        return iter({**self._pending, **self._made})

    def __len__(self) -> int:
        return len({**self._pending, **self._made})

    def pending(self, role: str) -> Pending | None:
        return None if role in self._made else self._pending.get(role)

    @staticmethod
    def _make(role: str, announced: Pending) -> np.ndarray:
        array = announced.make()
        if (array.dtype, array.shape) != (announced.dtype, announced.shape):
            raise ValueError(f"{role} was announced as {announced.dtype} {announced.shape}, and is not")
        return array


def pending(tensors: Mapping[str, np.ndarray], role: str) -> Pending | None:
    """What ``role`` would be made of; None if it is an array already."""
    return tensors.pending(role) if isinstance(tensors, LazyTensors) else None
