"""The check of a writer."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from ktforge.contract.checks import check_paths, expected
from ktforge.contract.identity import Identity
from ktforge.contract.plan import ModelConfig, Plan, Recipe, Sink, Writer
from ktforge.contract.tensors import BF16, FileSpec, SourceFile, TensorSpec
from ktforge.errors import KtforgeError
from ktforge.testing.common import bound, is_same, kept
from ktforge.testing.memory import MemoryLoader

Tensors = Mapping[str, np.ndarray]
CONFIG = "config.json"
SIDE_FILE = "tokenizer.json"
THREADS = 4


def some_tensors() -> dict[str, np.ndarray]:
    """Tensors of several dtypes and shapes, one without an axis and one without an element among them."""
    random = np.random.default_rng(0)
    return {
        "model.embed.weight": random.standard_normal((24, 16)).astype(BF16),
        "model.layers.0.codes": random.integers(-8, 8, (16, 40), np.int8),
        "model.layers.0.scales": random.standard_normal((16, 5), np.float32),
        "model.layers.1.fused": random.standard_normal((3, 8, 16)).astype(np.float16),
        "model.norm.weight": np.arange(7, dtype=np.int64),
        "model.step": np.array(3, np.float32),
        "model.nothing": np.empty((0, 4), np.float32),
    }


def check_writer(
    writer: Writer,
    tensors: Tensors | None = None,
    *,
    formats: Sequence[str] = (),
    read_back: Callable[[], Tensors] | None = None,
) -> Plan:
    """Asserts that a writer keeps its contract on ``tensors`` in the layouts' ``formats``, and returns what it wrote.

    The plan has every tensor once, in files within the folder, of the sizes that it says. Nothing is published after an
    exception, and what the next run is told is in place need not come again. Tensors come in any order, from several
    threads, whole or some rows at a time, and their memory is used again. A clean exit publishes them; a finished
    output is replaced if that is asked for, and else refused. A writer with a ``folder``, which must not be there
    before, has the planned files in it, with config.json and the side files. ``read_back`` reads the output: it
    fails, or finds nothing, where none is published.
    """
    tensors = some_tensors() if tensors is None else tensors
    writer = bound(writer, None)
    folder = writer.folder()
    assert folder is None or not folder.exists(), f"{folder} is there already: give the writer a new folder"
    with tempfile.TemporaryDirectory() as below:
        plan = _plan(writer, tensors, formats, _source(Path(below)))
        kept_tensors = _cut_off(plan, tensors)
        _check_nothing(plan, read_back)
        _write(plan, tensors, kept_tensors)
        _check_published(plan, tensors, read_back)
        if folder is not None:
            _check_refused(plan)
        _write(plan, tensors, (), overwrite=True)
        _check_published(plan, tensors, read_back)
    return plan


class _Source(MemoryLoader):
    """A checkpoint that is named by a file, without which no unfinished output can be told from another's."""

    name: ClassVar[str] = "kit"
    file: Path

    def sources(self) -> Sequence[SourceFile]:
        return [SourceFile(self.file, self.file.stat().st_size, "0" * 32)]

    def folder(self) -> Path:
        return self.file.parent


def _source(folder: Path) -> _Source:
    (folder / "weights").write_bytes(b"weights")
    (folder / SIDE_FILE).write_bytes(b"{}")
    return _Source(tensors={}, model={"model_type": "kit"}, file=folder / "weights")


def _plan(writer: Writer, tensors: Tensors, formats: Sequence[str], loader: _Source) -> Plan:
    specs = tuple(TensorSpec(name, a.dtype, a.shape) for name, a in tensors.items())
    files = tuple(writer.plan(specs, formats))
    with kept():
        for file in files:
            expected(writer, file, FileSpec, "the output")
        check_paths(file.path for file in files)
    assert len({file.path for file in files}) == len(files), f"{writer.name} plans a file twice"
    planned = Counter(t for file in files for t in file.tensors)
    assert planned == Counter(specs), f"{writer.name} does not plan every tensor once: {planned - Counter(specs)}"
    for file in files:
        header = bytes(file.header)
        assert len(file.header) == len(header), f"{file.path} has a header of {len(header)} bytes, not as it says"
        assert file.nbytes == len(header) + sum(t.nbytes for t in file.tensors), f"{file.path} says a wrong size"
    _check_weights(writer, files)
    model = ModelConfig("kit", 1, 0, 0, 0, frozenset())
    return Plan(
        Recipe(loader=loader, writer=writer), model, (), files, b'{"model_type": "kit"}\n', (Path(SIDE_FILE),),
        tuple(loader.sources()), (), (), {}, {writer.name: writer.weights},
        identities={loader.file: Identity.of(loader.file.stat())},
    )  # fmt: skip


def _check_weights(writer: Writer, files: Iterable[FileSpec]) -> None:
    """An output that is replaced must be found, or its files stay beside the new ones."""
    if writer.folder() is None:
        return
    patterns = ("*.safetensors", "*.bin", *writer.weights)
    for file in files:
        found = any(PurePosixPath(file.path).match(pattern) for pattern in patterns)
        assert found, f"`weights` of {writer.name} has no pattern for its file {file.path}"


class _CutOff(Exception):
    pass


def _cut_off(plan: Plan, tensors: Tensors) -> set[str]:
    """A run that fails behind half of the tensors; the names of those that the next one need not bring."""
    written = _specs(plan)[::2]
    try:
        with plan.pipeline.writer.open(plan) as sink:
            assert not [t for t in _specs(plan) if sink.has(t)], "has() says that a new output holds a tensor"
            for tensor in written:
                sink.write(tensor, tensors[tensor.name])
            raise _CutOff
    except _CutOff:
        return {tensor.name for tensor in written}
    raise AssertionError(f"{plan.pipeline.writer.name} swallows the exception of a run that failed")


def _write(plan: Plan, tensors: Tensors, may_have: Iterable[str], **options: bool) -> None:
    """All that is missing, last tensors first."""
    with plan.pipeline.writer.open(plan, **options) as sink:
        there = {t.name for t in _specs(plan) if sink.has(t)}
        assert there <= set(may_have), f"has() says so of {sorted(there - set(may_have))}, which were never written"
        work = [piece for t in reversed(_specs(plan)) if t.name not in there for piece in _pieces(t)]
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(_put, sink, t, tensors[t.name], rows) for t, rows in work]:
                done.result()


def _pieces(tensor: TensorSpec) -> Iterator[tuple[TensorSpec, slice | None]]:
    """A tensor whole, or if it has several rows in two pieces, the last rows first."""
    half = tensor.shape[0] // 2 if len(tensor.shape) > 1 else 0
    if not half or not tensor.nbytes:
        yield tensor, None
    else:
        yield tensor, slice(half, tensor.shape[0])
        yield tensor, slice(0, half)


def _put(sink: Sink, tensor: TensorSpec, data: np.ndarray, rows: slice | None) -> None:
    buffer = data.copy() if rows is None else data[rows].copy()
    sink.write(tensor, buffer, None if rows is None else rows.start)
    buffer.reshape(-1).view(np.uint8)[:] = 0xA5  # as a worker does, which uses it for the next unit


def _check_nothing(plan: Plan, read_back: Callable[[], Tensors] | None) -> None:
    writer, folder = plan.pipeline.writer, plan.pipeline.writer.folder()
    if folder is not None:
        there = [file.path for file in plan.files if (folder / file.path).exists()]
        assert not there, f"{writer.name} has published {there[0]} of a run that failed"
    if read_back is None:
        return
    try:
        found: Any = read_back()
    except Exception:
        return
    assert not found, f"{writer.name} has published {sorted(found)} of a run that failed"


def _check_refused(plan: Plan) -> None:
    writer = plan.pipeline.writer
    try:
        with writer.open(plan):
            raise AssertionError(f"{writer.name} opens a folder with a finished output, and overwrite is not said")
    except KtforgeError:
        pass


def _check_published(plan: Plan, tensors: Tensors, read_back: Callable[[], Tensors] | None) -> None:
    writer, folder = plan.pipeline.writer, plan.pipeline.writer.folder()
    if folder is not None:
        for file in plan.files:
            path = folder / file.path
            assert path.is_file(), f"{writer.name} has not published {file.path}"
            wanted = bytes(file.header) + b"".join(tensors[t.name].tobytes() for t in file.tensors)
            assert path.read_bytes() == wanted, f"{file.path} is not its header and its tensors one behind the other"
        for name, content in ((CONFIG, plan.config_json), (SIDE_FILE, b"{}")):
            there = (folder / name).is_file() and (folder / name).read_bytes()
            assert there == content, f"{writer.name} has not published {name} as it was planned"
    if read_back is not None:
        found = read_back()
        assert found.keys() == tensors.keys(), f"{sorted(found)} can be read of {sorted(tensors)}"
        for name, array in tensors.items():
            got = found[name]
            assert is_same(got, array), f"{name} is read as {got.dtype} {got.shape}, not as it was written"


def _specs(plan: Plan) -> list[TensorSpec]:
    return [tensor for file in plan.files for tensor in file.tensors]
