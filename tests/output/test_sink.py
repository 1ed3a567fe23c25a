"""What the journal notes of tensors that were written, and of those that were not."""

import errno

import numpy as np
import pytest
import xxhash
from conversions import model, pipeline
from faults import Disk, fails
from ktforge_plugins import SafetensorsWriter

from ktforge import PluginError, TensorSpec, open_folder
from ktforge.disk import writing
from ktforge.disk.journal import Journal
from ktforge.disk.marks import JOURNAL, PARTIAL
from ktforge.output import sink as sinks
from ktforge.output.hashing import Growing

U8 = np.dtype(np.uint8)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model", 1, 2, 128, 128)


def zeros(tensor):
    return np.zeros(tensor.shape, tensor.dtype)


def noted(out):
    return set(Journal(out / PARTIAL / JOURNAL).written)


def test_nothing_is_noted_behind_a_sync_that_failed(source, out, monkeypatch):
    """The next sync of the file would succeed, whether or not the first one's bytes are on the disk (fsync(2))."""
    plan = pipeline(source, SafetensorsWriter(path=out)).plan()
    one, two, three, *_ = [t for f in plan.files for t in f.tensors]
    failing = []

    def action(call):
        if call.name == "fsync" and "model" in call.path.name and failing == [True]:
            failing.append(False)
            return fails(errno.EIO)(call)
        return call.really()

    monkeypatch.setattr(sinks, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(writing, "os", Disk(action))
    with pytest.raises(KeyboardInterrupt), open_folder(out, plan, {}) as sink:
        sink.write(one, zeros(one))
        assert noted(out) == {one.name}
        failing.append(True)
        with pytest.raises(OSError, match="Input/output"):
            sink.write(two, zeros(two))
        sink.write(three, zeros(three))
        raise KeyboardInterrupt
    assert failing == [True, False] and noted(out) == {one.name}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_complete_files_wait_for_the_next_save_but_not_too_many_of_them(source, out, monkeypatch, most):
    plan = pipeline(source, SafetensorsWriter(path=out, max_shard_size=1)).plan()
    assert len(plan.files) > 10 and all(len(f.tensors) == 1 for f in plan.files)
    monkeypatch.setattr(sinks, "MAX_WAITING", most)
    monkeypatch.setattr(sinks, "SAVE_EVERY", 1e9)
    with open_folder(out, plan, {}) as sink:
        for i, file in enumerate(plan.files, 1):
            sink.write(file.tensors[0], zeros(file.tensors[0]))
            assert len(noted(out)) == i // most * most
            assert len(sink._open) == i % most


def test_work_is_noted_once_enough_of_it_is_at_stake(source, out, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: clock[0])
    plan = pipeline(source, SafetensorsWriter(path=out)).plan()
    tensors = [t for f in plan.files for t in f.tensors]
    with pytest.raises(KeyboardInterrupt), open_folder(out, plan, {}) as sink:
        for seconds, count in ((19.9, 0), (20.0, 2), (39.9, 2), (40.0, 4)):
            clock[0] = 100.0 + seconds
            tensor = tensors.pop(0)
            sink.write(tensor, zeros(tensor))
            assert len(noted(out)) == count, seconds
        raise KeyboardInterrupt


def test_a_piece_comes_once_whether_or_not_it_was_its_turn(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    growing = Growing(TensorSpec("t", U8, (90,)))
    with (tmp_path / "file").open("rb") as opened:
        assert growing.turn(30) is None and not growing.add(30, 30, False, opened.fileno(), 5)
        with pytest.raises(PluginError, match="rows of t were written twice"):
            growing.turn(30)
        found = growing.turn(0)
        assert found is growing.found
        found.update(bytes(range(5, 35)))
        assert not growing.add(0, 30, True, opened.fileno(), 5)
        for begin in (0, 30, 59):
            with pytest.raises(PluginError, match="rows of t were written twice"):
                growing.turn(begin)
        assert growing.turn(60) is growing.found
        growing.found.update(bytes(range(65, 95)))
        assert growing.add(60, 30, True, opened.fileno(), 5)
    assert growing.found.hexdigest() == xxhash.xxh3_128_hexdigest(bytes(range(5, 95)))
