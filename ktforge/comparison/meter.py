"""A writer that writes nothing: what it is given of one side, it compares with the other's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from pydantic import PrivateAttr

from ktforge.comparison.side import Key, Side
from ktforge.contract.plan import Plan, Sink, Writer
from ktforge.contract.tensors import FileSpec, TensorSpec
from ktforge.measure.codes import Codes
from ktforge.measure.weights import FLOATS, Measures


class Meter(Writer):
    """Behind the pipeline that reads one side; :meth:`against` says what to measure it with."""

    name: ClassVar[str] = "comparison"

    _other: Side | None = PrivateAttr(default=None)
    _keys: dict[str, Key] = PrivateAttr(default_factory=dict)
    _found: dict[str, tuple[Measures, Codes | None]] = PrivateAttr(default_factory=dict)
    _unequal: set[str] = PrivateAttr(default_factory=set)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def against(self, other: Side, keys: dict[str, Key]) -> None:
        """``keys`` are the names of tensors to look at, as the side that is written calls them, and what the ``other``
        side has in their place."""
        self._other, self._keys = other, keys
        self._found.clear()
        self._unequal.clear()

    def wants(self, tensor: TensorSpec) -> bool:
        """Whether a tensor is to be looked at."""
        return tensor.name in self._keys

    @property
    def found(self) -> dict[str, tuple[Measures, Codes | None]]:
        """Name → how far the other side is from it."""
        return self._found

    @property
    def unequal(self) -> set[str]:
        """Names of tensors of integers whose bytes differ."""
        return self._unequal

    def plan(self, tensors: Sequence[TensorSpec], formats: Sequence[str]) -> Sequence[FileSpec]:
        return [FileSpec("compared", b"", tuple(tensors))]

    @contextmanager
    def open(
        self, plan: Plan, *, overwrite: bool = False, restart: bool = False, verify: bool = False
    ) -> Iterator[Sink]:
        yield _Sink(self)

    def measure(self, tensor: TensorSpec, data: np.ndarray, row: int | None) -> None:
        assert self._other is not None
        other, codes = self._other.weight(self._keys[tensor.name], row, len(data) if data.ndim else 0)
        if {data.dtype, other.dtype} <= set(FLOATS):
            measures = Measures.of(data, other)
        else:
            measures = Measures(data.size)
            if data.dtype != other.dtype or data.tobytes() != other.tobytes():
                with self._lock:
                    self._unequal.add(tensor.name)
        with self._lock:
            before, known = self._found.get(tensor.name, (Measures(), None))
            self._found[tensor.name] = before + measures, codes or known


class _Sink:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def has(self, tensor: TensorSpec) -> bool:
        """What is not to be looked at is passed over as if it were there already."""
        return not self._meter.wants(tensor)

    def write(self, tensor: TensorSpec, data: np.ndarray, row: int | None = None) -> None:
        if self._meter.wants(tensor):  # it may have come with others of its unit
            self._meter.measure(tensor, data, row)
