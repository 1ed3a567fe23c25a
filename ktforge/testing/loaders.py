"""The check of a loader."""

from __future__ import annotations

import string
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ktforge.contract.checks import check_paths, check_specs, delivered, expected_tensors
from ktforge.contract.stages import Loader
from ktforge.contract.tensors import TensorSpec, Unit, UnitSpec
from ktforge.testing.common import bound, check_scratch, is_same, kept, peak_of

THREADS = 4
_HASH = 32


def check_loader(loader: Loader, tensors: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Asserts that a loader keeps its contract on the checkpoint that it opens, and returns copies of all tensors.

    It names every tensor once, soundly, and the same ones when it is asked again; it reads them as it named them, again
    and again, in several threads, with and without ``release``; ``rows`` reads the same rows. Sources and side files
    are files that are there. A loader with ``reads`` knows its own folder, opens it by its path, and no empty one.
    Memory is what ``scratch_bytes`` says (of tensors that are much larger than 200 kB, that means something).
    ``tensors`` are what it should read.
    """
    config = loader.config()
    assert isinstance(config, Mapping), f"config() of {loader.name} gives {type(config).__name__}, no mapping"
    specs = _scanned(loader)
    _check_files(loader, specs)
    _check_folder(loader, specs)
    loader = bound(loader, config)
    read = {spec.name: _read(loader, spec).copy() for spec in specs}
    for spec in specs:
        loader.release(spec)
        _check_scratch(loader, spec)
        _check_rows(loader, spec, read[spec.name])
    _check_threads(loader, specs, read)
    if tensors is not None:
        assert read.keys() == tensors.keys(), f"{loader.name} reads {sorted(read)}, not {sorted(tensors)}"
        for name, wanted in tensors.items():
            got = read[name]
            assert is_same(got, wanted), f"{loader.name} reads {name} as {got.dtype} {got.shape}, not as it was given"
    return read


def _scanned(loader: Loader) -> tuple[TensorSpec, ...]:
    specs = tuple(loader.scan())
    with kept():
        expected_tensors(loader, specs, "the checkpoint")
    check_specs(specs)
    names = [spec.name for spec in specs]
    assert names, f"{loader.name} finds no tensor"
    assert len(set(names)) == len(names), f"{loader.name} names a tensor twice: {names}"
    assert tuple(loader.scan()) == specs, f"{loader.name} finds other tensors when it looks again"
    return specs


def _read(loader: Loader, spec: TensorSpec) -> np.ndarray:
    with kept():
        unit = UnitSpec(spec.name, {"weight": spec})
        return delivered(loader, Unit(unit, {"weight": loader.read(spec)}), unit).tensors["weight"]


def _check_scratch(loader: Loader, spec: TensorSpec) -> None:
    peak = peak_of(lambda: _read(loader, spec))[1]
    check_scratch(loader, peak, spec.nbytes, loader.scratch_bytes(spec))


def _check_rows(loader: Loader, spec: TensorSpec, whole: np.ndarray) -> None:
    count = spec.shape[0] if spec.shape and spec.nbytes else 0
    for start, stop in {(0, 1), (count - 1, count), (count // 2, count), (0, count)} if count else ():
        piece = loader.rows(spec, start, stop)
        if piece is None:
            continue
        assert piece.is_like(spec.rows(start, stop)), f"rows() of {loader.name} gives {piece} for {stop - start} rows"
        same = _read(loader, piece).tobytes() == whole[start:stop].tobytes()
        assert same, f"{loader.name} reads other bytes as rows {start} to {stop} of {spec.name}"
        loader.release(piece)


def _check_threads(loader: Loader, specs: Sequence[TensorSpec], read: Mapping[str, np.ndarray]) -> None:
    """Each tensor several times at once, from threads that also let go of it."""

    def again(spec: TensorSpec) -> bool:
        same = _read(loader, spec).tobytes() == read[spec.name].tobytes()
        loader.release(spec)
        return same

    work = [spec for spec in specs for _ in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for spec, same in zip(work, pool.map(again, work), strict=True):
            assert same, f"{loader.name} reads other bytes of {spec.name} when it reads it again, in several threads"


def _check_files(loader: Loader, specs: Sequence[TensorSpec]) -> None:
    sources = {source.path: source for source in loader.sources()}
    for path, source in sources.items():
        assert path.is_file(), f"sources() of {loader.name} names {path}, which is no file"
        assert source.nbytes == path.stat().st_size, f"sources() of {loader.name} gives {path} {source.nbytes} bytes"
        sound = len(source.header_hash) == _HASH and set(source.header_hash) <= set(string.hexdigits)
        assert sound, f"sources() of {loader.name} gives {path} the hash {source.header_hash!r}, which is no xxh3-128"
    files = {spec.file for spec in specs} - {None}
    assert files <= sources.keys(), f"sources() of {loader.name} leaves out {sorted(map(str, files - sources.keys()))}"
    side_files = loader.side_files()
    with kept():
        check_paths(map(str, side_files))
    assert len(set(side_files)) == len(side_files), f"side_files() of {loader.name} names a file twice"
    folder = loader.folder()
    for path in side_files:
        assert folder is None or folder / path not in files, f"{path} goes along unchanged, and holds weights"
        with loader.open_side_file(path) as opened:
            assert isinstance(opened.read(), bytes), f"open_side_file() of {loader.name} opens {path} as text"


def _check_folder(loader: Loader, specs: Sequence[TensorSpec]) -> None:
    cls, folder = type(loader), loader.folder()
    if cls.reads.__func__ is Loader.reads.__func__:  # type: ignore[attr-defined]
        return
    assert folder is not None, f"{cls.name} says what folders it reads, and has none"
    assert cls.reads(folder) is True, f"reads() of {cls.name} does not know its own folder {folder}"
    with tempfile.TemporaryDirectory() as empty:
        assert cls.reads(Path(empty)) is False, f"reads() of {cls.name} takes an empty folder for its own"
    opened = cls(path=folder)  # type: ignore[call-arg]
    assert tuple(opened.scan()) == specs, f"{cls.name}(path={str(folder)!r}), which auto makes, finds other tensors"
