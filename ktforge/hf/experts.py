"""Experts as they are computed with, read one by one from a checkpoint and kept as far as memory allows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch.nn.functional import linear

from ktforge.comparison.side import Side
from ktforge.errors import ConfigError
from ktforge.hf.arrays import tensor_of
from ktforge.hf.integers import IntegerProjection
from ktforge.hf.sides import ROLES
from ktforge.native import lost_pages_caught


class Expert(Protocol):
    """One expert of one layer."""

    nbytes: int

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] → [n, 2 * expert size], gate before up."""

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """[n, expert size] → [n, hidden]."""


class FloatExpert:
    """Exact arithmetic on the weights as they are read back."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._gate, self._up, self._down = weights
        self.nbytes = sum(w.nbytes for w in weights)

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((linear(x, self._gate), linear(x, self._up)), dim=-1)

    def down(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._down)


class IntegerExpert:
    """Integer codes times activations that are rounded to int8, as the engine computes."""

    def __init__(self, projections: list[IntegerProjection]) -> None:
        self._gate, self._up, self._down = projections
        self.nbytes = sum(p.nbytes for p in projections)

    def gate_up(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self._gate(x), self._up(x)), dim=-1)

    def down(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(x)


class ExpertSource:
    """The experts of one checkpoint. ``cache`` bounds the bytes of those that are kept, the last ones used; ``workers``
    read ahead. ``integers``: :class:`IntegerExpert` in place of :class:`FloatExpert`."""

    def __init__(
        self, side: Side, *, dtype: torch.dtype, device: torch.device, cache: int, workers: int, integers: bool = False
    ) -> None:
        self.side, self._dtype, self._device, self._limit = side, dtype, device, cache
        self._integers, self._workers = integers, workers
        self._kept: OrderedDict[tuple[int, int], Expert] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(workers, thread_name_prefix="ktforge-experts")
        if integers and side.packed is None:
            raise ConfigError(
                f"{side.folder} holds no integer codes, so that nothing is known of int8 activations: leave "
                "`activations` out, or convert it first"
            )

    def these(self, layer: int, experts: Iterable[int]) -> Iterator[Expert]:
        """Experts of one layer in this order; the next ones are read while the last is computed with."""
        waiting = iter(experts)
        ahead: list[Future[Expert]] = []
        try:
            while True:
                for expert in waiting:
                    ahead.append(self._readers.submit(self.get, layer, expert))
                    if len(ahead) > self._workers:
                        break
                if not ahead:
                    return
                yield ahead.pop(0).result()
        finally:
            for future in ahead:
                future.cancel()

    def get(self, layer: int, expert: int) -> Expert:
        key = layer, expert
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with lost_pages_caught():
            found = self._read(layer, expert)
        with self._lock:
            if key not in self._kept and found.nbytes <= self._limit:
                self._kept[key] = found
                self._bytes += found.nbytes
                while self._bytes > self._limit:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _read(self, layer: int, expert: int) -> Expert:
        if not self._integers:
            return FloatExpert([self._weight(layer, expert, role) for role in ROLES])
        packed = self.side.packed
        assert packed is not None
        specs = [self.side.places[layer, expert, role].tensor for role in ROLES]
        return IntegerExpert([IntegerProjection(packed.parts(s), s.shape, self._dtype, self._device) for s in specs])

    def _weight(self, layer: int, expert: int, role: str) -> torch.Tensor:
        array, _ = self.side.weight((layer, expert, role))
        # A copy of its own: what is read may be a view of a mapped file that is let go of, or of a whole fused tensor.
        weight = tensor_of(array).to(self._device, self._dtype, copy=True)
        del array
        self.side.release((layer, expert, role))
        return weight
