"""check_writer passes ktforge's own writers, and catches what it is there to catch."""

from contextlib import contextmanager, suppress
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import KtFolderWriter, SafetensorsWriter

from ktforge import FileSpec, open_folder
from ktforge.testing import MemoryWriter, check_writer


@pytest.mark.parametrize("limit", ["300", "1KB", "5GB"])
def test_safetensors(out, limit):
    writer = SafetensorsWriter(path=out, max_shard_size=1 if limit == "300" else limit)
    check_writer(writer, read_back=lambda: checkpoints.load_output(out))


def test_kt_folder(out):
    names = [f"blk.0.ffn_{p}_exps.{e}.numa.0" for p in ("gate", "up", "down") for e in range(2)]
    packed = {f"{name}.weight": np.full(64, i, np.int8) for i, name in enumerate(names)}
    scales = {f"{name}.scale": np.full(8, i, np.float32) for i, name in enumerate(names)}
    check_writer(
        KtFolderWriter(path=out), {**packed, **scales, "norm": np.ones(3, np.float32)}, formats=["kt-amx-int8/1"]
    )


def test_memory():
    writer = MemoryWriter()
    check_writer(writer, read_back=lambda: writer.tensors)


class InMemory(MemoryWriter):
    """One that does right; subclasses do not."""

    name: ClassVar[str] = "in-memory"

    def sink(self, written):
        class Sink:
            def has(self, tensor):
                return False

            def write(self, tensor, data, row=None):
                whole = written.setdefault(tensor.name, np.empty(tensor.shape, tensor.dtype))
                whole[... if row is None else slice(row, row + len(data))] = data

        return Sink()

    @contextmanager
    def open(self, plan, **options):
        written = {}
        yield self.sink(written)
        self._tensors.update(written)


class AlwaysPublishes(InMemory):
    name: ClassVar[str] = "always-publishes"

    @contextmanager
    def open(self, plan, **options):
        yield self.sink(self._tensors)


class Swallows(InMemory):
    name: ClassVar[str] = "swallows"

    @contextmanager
    def open(self, plan, **options):
        with suppress(Exception):
            yield self.sink({})


class HoldsMemory(InMemory):
    name: ClassVar[str] = "holds-memory"

    def sink(self, written):
        sink = super().sink(written)
        whole = sink.write
        sink.write = lambda t, data, row=None: written.update({t.name: data}) if row is None else whole(t, data, row)
        return sink


class NoRows(InMemory):
    name: ClassVar[str] = "no-rows"

    def sink(self, written):
        sink = super().sink(written)
        whole = sink.write
        sink.write = lambda tensor, data, row=None: whole(tensor, data, 0 if row else row)
        return sink


class HasAll(InMemory):
    name: ClassVar[str] = "has-all"

    def sink(self, written):
        sink = super().sink(written)
        sink.has = lambda tensor: bool(self._tensors) or tensor.name == "model.step"
        return sink


class LosesOne(InMemory):
    name: ClassVar[str] = "loses-one"

    def plan(self, tensors, formats):
        return super().plan(tensors[1:], formats)


class PlansTwice(InMemory):
    name: ClassVar[str] = "plans-twice"

    def plan(self, tensors, formats):
        return [*super().plan(tensors, formats), *super().plan(tensors, formats)]


class Outside(InMemory):
    name: ClassVar[str] = "outside"

    def plan(self, tensors, formats):
        return [FileSpec("../memory", b"", tuple(tensors))]


class WrongSize(InMemory):
    name: ClassVar[str] = "wrong-size"

    def plan(self, tensors, formats):
        class Long(bytes):
            def __len__(self):
                return 7

        return [FileSpec("memory", Long(b"four"), tuple(tensors))]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (AlwaysPublishes, "always-publishes has published .* of a run that failed"),
        (Swallows, "swallows swallows the exception"),
        (HoldsMemory, "is read as .*, not as it was written"),
        (NoRows, "is read as .*, not as it was written"),
        (HasAll, r"has\(\) says that a new output holds a tensor"),
        (LosesOne, "loses-one does not plan every tensor once"),
        (PlansTwice, "plans-twice plans a file twice"),
        (Outside, "'../memory', which is outside the output folder"),
        (WrongSize, "memory has a header of 4 bytes, not as it says"),
    ],
)
def test_check_writer_catches(cls, message):
    writer = cls()
    with pytest.raises(AssertionError, match=message):
        check_writer(writer, read_back=lambda: writer.tensors)


class Raw(InMemory):
    """Writes into a folder, without the care of open_folder."""

    name: ClassVar[str] = "raw"
    weights: ClassVar[tuple[str, ...]] = ("memory",)
    path: str

    def folder(self):
        return checkpoints.Path(self.path)

    @contextmanager
    def open(self, plan, **options):
        self.folder().mkdir(exist_ok=True)
        written = {}
        try:
            yield self.sink(written)
        finally:
            tensors = [written.get(t.name, np.zeros(0)) for f in plan.files for t in f.tensors]
            (self.folder() / "memory").write_bytes(b"".join(t.tobytes() for t in tensors))


class WithoutConfig(Raw):
    name: ClassVar[str] = "without-config"

    @contextmanager
    def open(self, plan, **options):
        self.folder().mkdir(exist_ok=True)
        written = {}
        yield self.sink(written)
        tensors = [written[t.name] for f in plan.files for t in f.tensors]
        (self.folder() / "memory").write_bytes(b"".join(t.tobytes() for t in tensors))


class Unlisted(Raw):
    name: ClassVar[str] = "unlisted"
    weights: ClassVar[tuple[str, ...]] = ()


class Overwrites(Raw):
    name: ClassVar[str] = "overwrites"

    def open(self, plan, **options):
        return open_folder(self.folder(), plan, {}, overwrite=True)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Raw, "raw has published memory of a run that failed"),
        (WithoutConfig, "without-config has not published config.json as it was planned"),
        (Unlisted, "`weights` of unlisted has no pattern for its file memory"),
        (Overwrites, "overwrites opens a folder with a finished output, and overwrite is not said"),
    ],
)
def test_check_writer_catches_what_is_wrong_with_a_folder(out, cls, message):
    with pytest.raises(AssertionError, match=message):
        check_writer(cls(path=str(out)))
    assert not any(p.suffix == ".safetensors" for p in out.glob("*"))


def test_check_writer_wants_a_new_folder(tmp_path):
    with pytest.raises(AssertionError, match="is there already: give the writer a new folder"):
        check_writer(SafetensorsWriter(path=tmp_path))
