"""Every weight of a folder read once: hashed, and looked at for what no sound output has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from ktforge import native
from ktforge.contract.checks import blame
from ktforge.contract.finite import is_finite
from ktforge.contract.stages import Loader
from ktforge.contract.tensors import QuantSpec, TensorSpec
from ktforge.errors import CheckpointError, Problems
from ktforge.measure.codes import Faults, wrong_scales
from ktforge.model.units import COMPANION
from ktforge.native.cores import available_cores
from ktforge.readback.loader import PackedLoader

#: Pieces of work that wait for each thread: a large model has 100,000.
AHEAD = 4
CONVERT = "convert the original again"
#: Weights that a sample has.
MOST_WEIGHTS = 32


class Weights:
    """What was found in the weights; filled from any thread."""

    def __init__(self) -> None:
        self.scales, self.codes, self.values = Problems(), Problems(), Problems()
        #: File → where a part of it begins → its bytes and their xxh3-128.
        self.known: dict[Path, dict[int, tuple[int, bytes]]] = {}
        self.parts = self.tensors = 0
        #: Codes in all, and the lowest among them that readers may mind, with what to say of those.
        self.all_codes = 0
        self.lowest: dict[str, int] = {}
        self._lock = threading.Lock()

    def look(self, loader: Loader, tensors: tuple[TensorSpec, ...], experts: set[str], workers: int) -> None:
        """Reads all ``tensors`` that ``loader`` presents with so many threads; the names of weights of ``experts`` tell
        them from what may hold anything. Raises CheckpointError if a part of a file cannot be read."""
        lost = native.lost_pages()
        with native.lost_pages_caught():
            _all(self._work(loader, tensors, experts), workers)
        if native.lost_pages() != lost:
            raise CheckpointError(native.UNREADABLE)

    def _work(self, loader: Loader, tensors: tuple[TensorSpec, ...], experts: set[str]) -> Iterator[Callable[[], None]]:
        packed = loader if isinstance(loader, PackedLoader) else None
        for tensor in tensors:
            if packed is not None and packed.is_packed(tensor):
                for spec, stored in packed.stored(tensor):
                    yield partial(self._part, packed, spec, stored)
            else:
                yield partial(self._plain, loader, tensor, tensor.name in experts)

    def _part(self, loader: PackedLoader, spec: QuantSpec, stored: list[TensorSpec]) -> None:
        """One part of a packed weight, such as a NUMA node's."""
        arrays = {tensor.name: loader.inner.read(tensor) for tensor in stored}
        hashed = [(tensor, _digest(arrays[tensor.name])) for tensor in stored]
        with blame(loader.layout, spec.unit.name):
            (part,) = loader.layout.unpack(arrays, spec).parts
        found = Faults.of(spec, part)
        for tensor in stored:
            loader.inner.release(tensor)
        name = spec.unit.tensors[spec.parts[0].role].name
        with self._lock:
            self._note(hashed)
            self.parts += 1
            self.all_codes += part.codes.size
            for wrong, count in wrong_scales(found).items():
                if count and not (wrong == "below zero" and loader.layout.signed_scales):
                    self.scales.add(f"has scales {wrong}: {CONVERT}", name)
            if found.lowest and spec.symmetric:
                self._lowest(loader, spec, name, found.lowest)

    def _lowest(self, loader: PackedLoader, spec: QuantSpec, name: str, count: int) -> None:
        said = loader.layout.lowest_codes(spec)
        if said is not None and loader.layout.refuses_lowest_codes:
            self.codes.add(f"has codes of {-(1 << (spec.bits - 1))}, which {said}", name)
        elif said is not None:
            self.lowest[said] = self.lowest.get(said, 0) + count

    def _plain(self, loader: Loader, tensor: TensorSpec, is_expert: bool) -> None:
        """A tensor that is stored as it is."""
        with blame(loader, tensor.name):
            data = loader.read(tensor)
            inner = loader.as_stored(tensor) if isinstance(loader, PackedLoader) else tensor
        digest = _digest(data)
        finite, parameter = is_finite(np.ascontiguousarray(data)), tensor.name.rpartition(".")[2]
        is_scale = bool(COMPANION.fullmatch(parameter)) and "scale" in parameter
        with blame(loader, tensor.name):
            loader.release(tensor)
        with self._lock:
            self.tensors += 1
            self._note([(inner, digest)])
            if not finite and (is_expert or is_scale):
                where = self.scales if is_scale else self.values
                where.add(f"has NaN or infinity: {CONVERT}", tensor.name)

    def _note(self, hashed: list[tuple[TensorSpec, tuple[int, bytes]]]) -> None:
        for tensor, (nbytes, digest) in hashed:
            if tensor.file is not None and nbytes == tensor.nbytes:
                self.known.setdefault(tensor.file, {})[tensor.offset] = nbytes, digest

    def remarks(self) -> Iterator[str]:
        """What is no fault of the output, and yet one for some readers."""
        for said, count in self.lowest.items():
            yield f"{100 * count / self.all_codes:.2g} % of its codes are the lowest of their bits, which {said}"


def remarks_on_sample(loader: PackedLoader, tensors: Sequence[TensorSpec]) -> Iterator[str]:
    """What a look at some weights, evenly spread, says of codes that readers compute wrongly; nothing if there are
    none. Raises CheckpointError if a part of a file cannot be read."""
    packed = [tensor for tensor in tensors if loader.is_packed(tensor)]
    count = min(MOST_WEIGHTS, len(packed))
    chosen = tuple(packed[number * len(packed) // count] for number in range(count))
    found = Weights()
    found.look(loader, chosen, set(), available_cores())
    for remark in (*found.codes.lines(), *found.remarks()):
        yield f"{remark} ({count:,} of {len(packed):,} weights looked at)"


def _digest(data: np.ndarray) -> tuple[int, bytes]:
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return flat.nbytes, xxhash.xxh3_128_digest(flat.data)


def _all(work: Iterator[Callable[[], None]], workers: int) -> None:
    """Does all of it; what one of them raises ends the rest."""
    with ThreadPoolExecutor(workers) as threads:
        waiting: set[Future[None]] = set()
        try:
            for one in work:
                waiting.add(threads.submit(one))
                if len(waiting) >= AHEAD * workers:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in waiting:
                future.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
