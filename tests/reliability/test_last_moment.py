"""A source that changes between the last write and the first rename: what was read may be of both, so nothing is
published."""

import os

import pytest
from conversions import model, pipeline
from ktforge_plugins import SafetensorsWriter

from ktforge import CheckpointError, OutputError, Registry, hookimpl, native
from ktforge.disk.marks import UNFINISHED
from ktforge.output import folder as output_folder
from ktforge.output.folder import is_unfinished
from ktforge.running import execute
from ktforge.testing import MemoryWriter


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return model(tmp_path / "model", 1, 3, 128, 128, shards=3)


class AtTheEnd:
    """Does something once the last unit is written: no write looks at the source behind that."""

    def __init__(self, units, change):
        self.left, self.change = units, change

    @hookimpl
    def ktforge_unit_written(self, spec):
        self.left -= 1
        if not self.left:
            self.change()


def run(copy, out, change, writer=None):
    made = pipeline(copy, writer or SafetensorsWriter(path=out))
    observer = AtTheEnd(len(made.plan().units), change)
    try:
        made.run(workers=1, registry=Registry(observer))
    finally:
        assert observer.left == 0


@pytest.mark.parametrize("shard", [1, 2, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "changed while it was read: it had"),
        (lambda path: os.truncate(path, path.stat().st_size + 1), "changed while it was read: it had"),
        (lambda path: os.utime(path, ns=(1, 1)), "changed while it was read: it was modified"),
        (lambda path: os.utime(path, ns=(1, 1 << 62)), "changed while it was read: it was modified"),
        (lambda path: path.unlink(), "cannot be read any more: No such file or directory"),
    ],
    ids=["shorter", "longer", "older", "newer", "gone"],
)
def test_a_shard_that_changes_behind_the_last_write(copy, out, shard, change, message):
    path = copy / f"model-{shard:05}-of-00003.safetensors"
    with pytest.raises(CheckpointError, match=f"{path.name} {message}"):
        run(copy, out, lambda: change(path))
    assert is_unfinished(out) and not (out / UNFINISHED).exists() and not (out / "config.json").exists()


def test_a_page_that_is_gone_behind_the_last_write(copy, out, monkeypatch):
    """Whoever read it: an observer, or a plugin's thread."""
    lost = native.lost_pages()

    def change():
        monkeypatch.setattr(native, "lost_pages", lambda: lost + 1)

    with pytest.raises(CheckpointError, match=r"^a part of a source file cannot be read"):
        run(copy, out, change)
    assert is_unfinished(out) and not (out / "config.json").exists()


def test_a_writer_that_looks_at_no_pages_has_it_done(copy, out, monkeypatch):
    lost, writer = native.lost_pages(), MemoryWriter()
    with pytest.raises(CheckpointError, match=r"^a part of a source file cannot be read"):
        run(copy, out, lambda: monkeypatch.setattr(native, "lost_pages", lambda: lost + 1), writer)
    assert not writer.tensors


def test_nothing_is_published_before_the_source_was_looked_at(copy, out, monkeypatch):
    """The first look comes before anything is read, the last between the workers' end and the writer's next step."""
    events = []

    class Watch(execute.SourceWatch):
        def check(self, paths=None):
            events.append("looked at all" if paths is None else "looked")
            super().check(paths)

    monkeypatch.setattr(execute, "SourceWatch", Watch)
    made = pipeline(copy, SafetensorsWriter(path=out))
    made.run(workers=1)
    looks = [i for i, event in enumerate(events) if event == "looked at all"]
    assert looks == [0, len(events) - 1] and len(events) > 10


def test_a_run_that_has_nothing_left_to_write_looks_too(copy, out, monkeypatch):
    """All tensors are there, and only the publishing is left."""

    def stops(*arguments, **options):
        raise OutputError("stopped")

    made = pipeline(copy, SafetensorsWriter(path=out))
    with monkeypatch.context() as patched, pytest.raises(OutputError, match="stopped"):
        patched.setattr(output_folder, "publish", stops)
        made.run()

    class Resumed:
        @hookimpl
        def ktforge_resumed(self, specs):
            os.utime(copy / "model-00002-of-00003.safetensors", ns=(1, 1))

    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors changed while it was read"):
        made.run(registry=Registry(Resumed()))
    assert not (out / "config.json").exists()
