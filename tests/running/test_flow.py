"""How data flows through a run: memory bounds, hints to the loader, and the file calls underneath."""

import ctypes
import errno
import os
import threading
from collections import Counter
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from ktforge_plugins import Int4, KtAmx, MoeToBf16, SafetensorsLoader, SafetensorsWriter
from typer.testing import CliRunner

from ktforge import CheckpointError, ConfigError, OutputError, Pipeline, PlanError
from ktforge.cli import app
from ktforge.disk import system
from ktforge.disk.marks import PARTIAL
from ktforge.testing import MemoryLoader, MemoryWriter
from ktforge.text import parse_size


def pipeline(loader=None, **stages):
    loader = loader or MemoryLoader(tensors=checkpoints.tensors(), model=checkpoints.config())
    defaults = {"preprocess": [MoeToBf16()], "quantize": Int4(), "layout": KtAmx(), "writer": MemoryWriter()}
    return Pipeline(loader=loader, **{**defaults, **stages})


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_no_more_is_in_flight_than_the_limit_allows(fits):
    lock, most, now = threading.Lock(), 0, Counter()
    met = threading.Barrier(fits)

    class Watched(KtAmx):
        name: ClassVar[str] = "watched"

        def fused(self, quantizer, spec):
            pack = super().fused(quantizer, spec)

            def watched(unit, out):
                nonlocal most
                with lock:
                    now[unit.spec.name] += 1  # the last experts are packed in several threads each
                    most = max(most, len(+now))
                if unit.spec.layer == 0 and unit.spec.expert < checkpoints.EXPERTS // fits * fits:
                    met.wait(timeout=20)  # as many as fit are really in flight together
                pack(unit, out)
                with lock:
                    now[unit.spec.name] -= 1

            return watched

    made = pipeline(layout=Watched())
    expert = max(u.working_bytes for u in made.plan().units)
    made.run(workers=4, memory_limit=fits * expert)
    assert most == fits


def test_a_layout_that_fuses_whole_units_alone_is_not_asked_to_plan_parts():
    class Whole(KtAmx):
        name: ClassVar[str] = "whole"

        def plan(self, spec):
            assert len(spec.parts) == 6, "a part of a unit was to be planned"
            return super().plan(spec)

        def fused(self, quantizer, spec):
            return super().fused(quantizer, spec) if len(spec.parts) == 6 else None

    expected, writer = MemoryWriter(), MemoryWriter()
    pipeline(writer=expected).run(workers=1)
    pipeline(layout=Whole(), writer=writer).run(workers=32)  # more than units, so that parts would be worked on
    assert {n: a.tobytes() for n, a in writer.tensors.items()} == {n: a.tobytes() for n, a in expected.tensors.items()}


def test_a_unit_above_the_limit_is_refused_before_anything_runs(source, out):
    made = pipeline(SafetensorsLoader(path=source), writer=SafetensorsWriter(path=out))
    with pytest.raises(
        PlanError, match=r"mlp.experts.\d needs 989.18 kB, more than the memory limit of 100.00 kB: allow 1 MB"
    ):
        made.run(memory_limit=100_000)
    assert not out.exists()


def test_the_command_line_bounds_workers_and_memory(source, out):
    convert = ["convert", "--input-path", str(source), "--output", str(out), "--quant-method", "int4"]
    wrong = CliRunner().invoke(app, [*convert, "--memory-limit", "plenty"])
    assert isinstance(wrong.exception, ConfigError)
    assert str(wrong.exception).startswith("--memory-limit: 'plenty' is not a size such as 5GB")
    small = CliRunner().invoke(app, [*convert, "--memory-limit", "1kB"])
    assert isinstance(small.exception, PlanError) and not out.exists()
    assert CliRunner().invoke(app, [*convert, "--workers", "1", "--memory-limit", "1GiB"]).exit_code == 0


class Noting(MemoryLoader):
    name: ClassVar[str] = "noting"
    calls: list

    def read(self, spec):
        self.calls.append(("read", spec.name))
        return super().read(spec)

    def release(self, spec):
        self.calls.append(("release", spec.name))


def test_tensors_are_released_behind_the_workers():
    loader = Noting(tensors=checkpoints.tensors(), model=checkpoints.config(), calls=[])
    pipeline(loader).run(workers=1)
    read, released = ([n for k, n in loader.calls if k == kind] for kind in ("read", "release"))
    assert read == released and set(read) == set(loader.tensors)
    behind = 0
    for kind, _ in loader.calls:  # never more than the three tensors of one expert
        behind += 1 if kind == "read" else -1
        assert 0 <= behind <= 3


def test_a_failed_unit_is_released_too():
    class Fails(KtAmx):
        name: ClassVar[str] = "fails"

        def pack(self, unit, out):
            raise RuntimeError("oops")

    loader = Noting(tensors=checkpoints.tensors(), model=checkpoints.config(), calls=[])
    with pytest.raises(Exception, match="oops"):
        pipeline(loader, layout=Fails()).run(workers=2)
    kinds = [kind for kind, _ in loader.calls]
    assert kinds.count("read") == kinds.count("release")


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_tensors_are_the_same_by_either_way_and_after_release(source, io):
    loader = SafetensorsLoader(path=source, io=io)
    want = checkpoints.tensors()
    for spec in loader.scan():
        first = loader.read(spec)
        loader.release(spec)
        for array in (first, loader.read(spec)):
            assert array.dtype == want[spec.name].dtype and np.array_equal(array, want[spec.name])


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    folder = checkpoints.write(tmp_path / "m", checkpoints.tensors(), checkpoints.config())
    loader = SafetensorsLoader(path=folder, io="pread")
    spec = max(loader.scan(), key=lambda s: s.offset)
    size = spec.file.stat().st_size
    os.truncate(spec.file, spec.offset + 1)
    changed = f"{spec.file} changed while it was read: it had {size:,} bytes, and has {spec.offset + 1:,}$"
    with pytest.raises(CheckpointError, match=f"^{changed}"):
        loader.read(spec)


def fail_with(number):
    def call(*arguments):
        ctypes.set_errno(number)
        return -1

    return call


@pytest.mark.parametrize("missing", [None, fail_with(errno.EOPNOTSUPP)])
def test_a_file_system_that_cannot_allocate(source, tmp_path, monkeypatch, missing):
    loader = SafetensorsLoader(path=source)
    pipeline(loader, writer=SafetensorsWriter(path=tmp_path / "a")).run()
    monkeypatch.setattr(system, "_fallocate", missing)
    monkeypatch.setattr(system, "_sync_file_range", missing)
    pipeline(loader, writer=SafetensorsWriter(path=tmp_path / "b")).run()
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_full_disk_is_found_before_the_work(source, out, monkeypatch):
    monkeypatch.setattr(system, "_fallocate", fail_with(errno.ENOSPC))
    made = pipeline(SafetensorsLoader(path=source), writer=SafetensorsWriter(path=out))
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        made.run()
    assert [p.name for p in out.iterdir()] == [PARTIAL]
    monkeypatch.undo()
    made.run()
    assert (out / "ktforge_manifest.json").exists() and not (out / PARTIAL).exists()


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2GB", 2 * 10**9), ("1.5 kb", 1500), ("4GiB", 2**32), (" 3 mib ", 3 * 2**20)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "2GBs", "1,5GB", "½GB"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size such as 5GB"):
        parse_size(text)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_threads_that_cannot_be_started(monkeypatch, caplog, most):
    """Fewer do, and what they make is the same; with none, the run is refused."""
    begin, begun = threading.Thread.start, []

    def start(thread):
        if len(begun) == most:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    wanted, found = MemoryWriter(), MemoryWriter()
    pipeline(writer=wanted).run(workers=1)
    monkeypatch.setattr(threading.Thread, "start", start)
    if not most:
        with pytest.raises(PlanError, match=r"^no thread can be started: the system allows"):
            pipeline(writer=found).run(workers=4)
        return
    pipeline(writer=found).run(workers=4)
    assert f"{most} worker" in caplog.text and len(begun) == most
    assert {n: a.tobytes() for n, a in found.tensors.items()} == {n: a.tobytes() for n, a in wanted.tensors.items()}
