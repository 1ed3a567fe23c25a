"""check_loader passes ktforge's own loaders, and catches what it is there to catch."""

import itertools
from pathlib import Path
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
import torch
from ktforge_plugins import AutoLoader, BinLoader, SafetensorsLoader
from ktforge_plugins.loaders.kt_folder import KtFolderLoader
from torch_arrays import to_torch

from ktforge import SourceFile
from ktforge.contract.tensors import DTYPES
from ktforge.testing import MemoryLoader, check_loader

TENSORS = {"a.weight": np.arange(12, dtype=np.float32).reshape(4, 3), "b.weight": np.ones(5, np.int8)}


@pytest.mark.parametrize("cls", [SafetensorsLoader, AutoLoader])
def test_safetensors(source, cls):
    check_loader(cls(path=source), checkpoints.tensors())


def test_pread(source):
    check_loader(SafetensorsLoader(path=source, io="pread"), checkpoints.tensors())


def test_bin(tmp_path):
    torch.save({name: to_torch(a) for name, a in TENSORS.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    check_loader(BinLoader(path=tmp_path), TENSORS)


def test_kt_folder(tmp_path):
    (tmp_path / "_layer_0" / "_numa_0").mkdir(parents=True)
    (tmp_path / "_layer_0" / "_numa_0" / "INT4_up_0_64Byte_quant_.kt").write_bytes(bytes(range(64)))
    (tmp_path / "config.json").write_text("{}")
    read = check_loader(KtFolderLoader(path=tmp_path))
    assert read["blk.0.ffn_up_exps.0.numa.0.weight"].tobytes() == bytes(range(64))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_tensors_of_torch_in_memory(dtype):
    raw = np.arange(24 * dtype.itemsize, dtype=np.uint8)
    array = (raw % 3 == 0 if dtype == np.bool_ else raw.view(dtype)).reshape(3, 8)
    arrays = {"matrix": array, "scalar": array[1, 5].reshape(())}
    loader = MemoryLoader(tensors={name: to_torch(a) for name, a in arrays.items()}, model={})
    check_loader(loader, arrays)


class TwiceNamed(MemoryLoader):
    name: ClassVar[str] = "twice-named"

    def scan(self):
        return itertools.chain(super().scan(), super().scan())


class OddNames(MemoryLoader):
    name: ClassVar[str] = "odd-names"

    def scan(self):
        return (spec._replace(name=f"../{spec.name}") for spec in super().scan())


class ListShapes(MemoryLoader):
    name: ClassVar[str] = "list-shapes"

    def scan(self):
        return (spec._replace(shape=[*spec.shape]) for spec in super().scan())


class Transposed(MemoryLoader):
    name: ClassVar[str] = "transposed"

    def read(self, spec):
        return super().read(spec).T


class Forgets(MemoryLoader):
    """What was released is gone."""

    name: ClassVar[str] = "forgets"

    def release(self, spec):
        self.tensors[spec.name] = np.zeros_like(self.tensors[spec.name])


class OtherRows(MemoryLoader):
    name: ClassVar[str] = "other-rows"

    def rows(self, spec, start, stop):
        return spec.rows(0, stop - start)


class TooManyRows(MemoryLoader):
    name: ClassVar[str] = "too-many-rows"

    def rows(self, spec, start, stop):
        return spec


class OneAtATime(MemoryLoader):
    """Gives every thread the one buffer that it has."""

    name: ClassVar[str] = "one-at-a-time"
    buffer: ClassVar[np.ndarray] = np.empty(1 << 20, np.uint8)

    def read(self, spec):
        whole = super().read(spec)
        view = self.buffer[: whole.nbytes].view(whole.dtype).reshape(whole.shape)
        view[...] = whole
        return view


class NeedsMemory(MemoryLoader):
    name: ClassVar[str] = "needs-memory"

    def read(self, spec):
        np.zeros(1_000_000, np.uint8)
        return super().read(spec)


class NoMapping(MemoryLoader):
    name: ClassVar[str] = "no-mapping"

    def config(self):
        return [*super().config()]


class NoSource(MemoryLoader):
    name: ClassVar[str] = "no-source"

    def sources(self):
        return [SourceFile(Path("nowhere"), 1, "0" * 32)]


class FileWithoutSource(MemoryLoader):
    name: ClassVar[str] = "file-without-source"

    def scan(self):
        return (spec._replace(file=Path("weights")) for spec in super().scan())


class NoSideFile(MemoryLoader):
    name: ClassVar[str] = "outside"

    def side_files(self):
        return [Path("../secret")]


class ReadsNothing(MemoryLoader):
    name: ClassVar[str] = "reads-nothing"

    @classmethod
    def reads(cls, folder):
        return False

    def folder(self):
        return Path("here")


class ReadsAnything(ReadsNothing):
    name: ClassVar[str] = "reads-anything"

    @classmethod
    def reads(cls, folder):
        return True


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (TwiceNamed, "twice-named names a tensor twice"),
        (ListShapes, "plugin list-shapes .* planned .* a tuple of sizes were expected"),
        (Transposed, r"plugin transposed .* delivered a.weight as float32 \[3, 4\]; F32 \[4, 3\] was planned"),
        (Forgets, "forgets reads other bytes"),
        (OtherRows, "other-rows reads other bytes as rows"),
        (TooManyRows, r"rows\(\) of too-many-rows gives a.weight"),
        (NeedsMemory, r"scratch_bytes\(\) of needs-memory says 0, and"),
        (NoMapping, r"config\(\) of no-mapping gives list"),
        (NoSource, r"sources\(\) of no-source names nowhere, which is no file"),
        (FileWithoutSource, r"sources\(\) of file-without-source leaves out \['weights'\]"),
        (NoSideFile, "'../secret', which is outside"),
        (ReadsNothing, r"reads\(\) of reads-nothing does not know its own folder here"),
        (ReadsAnything, r"reads\(\) of reads-anything takes an empty folder for its own"),
    ],
)
def test_check_loader_catches(cls, message):
    with pytest.raises(AssertionError, match=message):
        check_loader(cls(tensors=dict(TENSORS), model={}))


def test_check_loader_catches_a_name_that_is_none():
    with pytest.raises(Exception, match="is no tensor's name"):
        check_loader(OddNames(tensors=TENSORS, model={}))


def test_check_loader_catches_one_buffer_for_all_threads():
    tensors = {f"{i}.weight": np.full((256, 1024), i, np.float32) for i in range(1, 4)}
    with pytest.raises(AssertionError, match="when it reads it again, in several threads"):
        for _ in range(20):  # threads may happen to take turns
            check_loader(OneAtATime(tensors=tensors, model={}))


@pytest.mark.parametrize("other", [{"a.weight": TENSORS["a.weight"]}, {**TENSORS, "b.weight": np.zeros(5, np.int8)}])
def test_check_loader_compares_with_what_it_should_read(other):
    with pytest.raises(AssertionError, match=r"reads \['a.weight', 'b.weight'\]|reads b.weight as int8"):
        check_loader(MemoryLoader(tensors=TENSORS, model={}), other)
