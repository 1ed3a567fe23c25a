"""The memory that results are packed into."""

from __future__ import annotations

import threading

import numpy as np

from ktforge.contract.tensors import PackedSpec, PackedUnit

#: Bytes; a cache line.
ALIGNMENT = 64


class Buffers(threading.local):
    """One block of memory for each worker, kept from one unit to the next: new pages took a tenth of all CPU time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, packed: PackedSpec) -> PackedUnit:
        """Arrays for the tensors, with whatever the memory held; they are good until this worker asks again."""
        sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in packed.tensors]
        if sum(sizes) > self._memory.nbytes:
            self.clear()
            self._memory = np.empty(sum(sizes), np.uint8)
        arrays, start = {}, 0
        for tensor, size in zip(packed.tensors, sizes, strict=True):
            flat = self._memory[start : start + tensor.nbytes]
            arrays[tensor.name] = flat.view(tensor.dtype).reshape(tensor.shape)
            start += size
        return arrays

    def clear(self) -> None:
        """Gives this worker's memory back: what is worked on next needs none, and is planned to have the room."""
        self._memory = np.empty(0, np.uint8)
