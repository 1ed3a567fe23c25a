"""A source that changes, is cut short or cannot be read while a run reads it: an error, and nothing is published."""

import errno
import mmap
import os
import signal
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from conversions import convert, model, pipeline
from faults import Disk, run_in_child
from ktforge_plugins import KtAmx, SafetensorsLoader, SafetensorsWriter

from ktforge import CheckpointError, Registry, UnitSpec, hookimpl, native
from ktforge.contract.identity import Identity
from ktforge.disk.marks import PARTIAL
from ktforge.output import sink
from ktforge.output.folder import is_unfinished
from ktforge.running.watch import SourceWatch, WatchedSink

PAGE = mmap.PAGESIZE


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return model(tmp_path / "model", 1, 6, 512, 256)


def while_packing(copy, out, change, loader=SafetensorsLoader, **options):
    """A pipeline that changes its source behind every expert that it packs."""

    class Changes(KtAmx):
        def fused(self, quantizer, quant):
            return None

        def pack(self, unit, buffers):
            super().pack(unit, buffers)
            for path in copy.glob("*.safetensors"):
                change(path)

    made = pipeline(copy, SafetensorsWriter(path=out))
    return made.model_copy(update={"loader": loader(path=copy, **options), "layout": Changes(threadpool_count=1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Which of the two says it depends on who comes first, the worker that writes or the other one, which reads.
        (
            lambda path: os.truncate(path, 100_000),
            r"(changed while it was read: it had .* bytes, and has 100,000|: it was cut short after it was opened)$",
        ),
        (lambda path: os.utime(path, ns=(1, 1)), r"changed while it was read: it was modified$"),
        (lambda path: path.unlink(missing_ok=True), r"cannot be read( any more)?: No such file or directory$"),
    ],
)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_source_that_changes_while_it_is_read_is_an_error(copy, out, change, message, io):
    """Mapped pages of a file that was cut short are gone: without care, the process would die of SIGBUS."""
    with pytest.raises(CheckpointError, match=message):
        while_packing(copy, out, change, io=io).run(workers=2)
    assert is_unfinished(out)


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 5000), "changed while it was read: it had .* bytes, and has 5,000$"),
        (os.unlink, "cannot be read: No such file or directory$"),
    ],
)
def test_a_source_that_changes_before_it_is_opened_is_an_error(copy, io, change, message):
    loader = SafetensorsLoader(path=copy, io=io)
    spec = max(loader.scan(), key=lambda s: s.offset)
    change(spec.file)
    with pytest.raises(CheckpointError, match=f"^{spec.file} {message}"):
        loader.read(spec)


@pytest.mark.parametrize("size", [0, 5000])
def test_a_source_that_is_cut_short_before_the_first_read_says_so(copy, out, size):
    """What was not read is released, too; that has no error of its own to tell."""

    class Cuts:
        @hookimpl
        def ktforge_planned(self, plan):
            for path in copy.glob("*.safetensors"):
                os.truncate(path, size)

    with pytest.raises(CheckpointError, match=rf"changed while it was read: it had .* bytes, and has {size:,}$"):
        pipeline(copy, SafetensorsWriter(path=out)).run(workers=1, registry=Registry(Cuts()))


def with_a_copied_tensor(copy, rows):
    """The checkpoint as one file, with a tensor of so many rows of 512 bytes that passes through; the path of it."""
    data = checkpoints.load_output(copy) | {"zz.weight": np.ones((rows, 256), checkpoints.BF16)}
    for path in copy.glob("model*"):
        path.unlink()
    checkpoints.write(copy, data, {**checkpoints.config(), "num_hidden_layers": 1, "num_experts": 6}, 1)
    return copy / "model.safetensors"


def restore(source, content, before):
    """As if the disk had failed for a while."""
    source.write_bytes(content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("restored", [False, True])
def test_a_page_that_is_gone_while_the_system_copies_it(copy, out, restored):
    """A tensor that passes through is hashed and then written from its mapped pages. One that goes in between is missed
    by the system: there, EFAULT takes the place of SIGBUS."""
    source = with_a_copied_tensor(copy, 1 << 10)
    before, content, faults = source.stat(), source.read_bytes(), []

    def lose(call):
        if call.name == "pwrite" and len(call.arguments[1]) == 1 << 19:
            os.truncate(source, PAGE)
        try:
            return call.really()
        except OSError as error:
            faults.append(error.errno)
            if restored:
                restore(source, content, before)
            raise

    said = "a part of its file cannot be read" if restored else "changed while it was read: it had"
    with pytest.raises(CheckpointError, match=said):
        convert(copy, out, Disk(lose), shard="10MB")
    assert faults[0] == errno.EFAULT and is_unfinished(out)
    assert "zz.weight" not in (out / PARTIAL / "journal.jsonl").read_text()


def test_a_page_that_is_gone_while_it_is_hashed(copy, out):
    """There it reads as zeros, which are written without an error. The tensor is of three pieces; its second
    is gone when it is its turn, and back before anybody looks at the file."""
    source = with_a_copied_tensor(copy, 6 << 10)
    before, content, pieces = source.stat(), source.read_bytes(), []

    def lose(call):
        result = call.really()
        if call.name == "pwrite" and len(call.arguments[1]) == sink.PIECE:
            pieces.append(bytes(call.arguments[1]))
            if len(pieces) == 1:
                os.truncate(source, PAGE)
            else:
                restore(source, content, before)
        return result

    with pytest.raises(CheckpointError, match=r"^zz.weight: a part of its file cannot be read: look at the disk's"):
        convert(copy, out, Disk(lose), shard="10MB")
    assert not any(pieces[1]) and all(pieces[0][1::2]), "zeros were written"
    assert "zz.weight" not in (out / PARTIAL / "journal.jsonl").read_text()
    convert(copy, out, Disk(), shard="10MB")
    assert np.array_equal(checkpoints.load_output(out)["zz.weight"], np.ones((6 << 10, 256), checkpoints.BF16))


def test_a_page_that_is_gone_by_the_end_publishes_nothing(copy, out, monkeypatch):
    """Whoever reads it: a sink of a plugin, or what opens the folder by itself."""
    plan = pipeline(copy, SafetensorsWriter(path=out)).plan()
    lost = iter([0])
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=r"^a part of a source file cannot be"):
        patched.setattr(native, "lost_pages", lambda: next(lost, 1))
        with plan.pipeline.writer.open(plan) as sink:
            for tensor in (t for f in plan.files for t in f.tensors):
                sink.write(tensor, np.zeros(tensor.shape, tensor.dtype))
    assert is_unfinished(out) and not (out / "config.json").exists()
    assert "written" not in (out / PARTIAL / "journal.jsonl").read_text()
    watch = SourceWatch(plan.identities)
    monkeypatch.setattr(native, "lost_pages", lambda: -1)
    with pytest.raises(CheckpointError, match=r"^a part of a source file cannot be read"):
        watch.check_pages()


class Fails:
    """A sink whose disk answers with an error."""

    def __init__(self, number):
        self.number = number

    def has(self, tensor):
        return False

    def write(self, tensor, data, row=None):
        raise OSError(self.number, os.strerror(self.number))


def test_other_errors_are_the_disks(copy):
    unit = UnitSpec("unit", {})
    sink = WatchedSink(Fails(errno.ENOSPC), SourceWatch({}), unit)
    with pytest.raises(OSError, match="No space"):
        sink.write(None, None)
    with pytest.raises(CheckpointError, match=r"^unit: a part of its file cannot be read: look at the disk's health"):
        WatchedSink(Fails(errno.EFAULT), SourceWatch({}), unit).write(None, None)


def test_only_known_files_are_looked_at(tmp_path):
    known = tmp_path / "known"
    known.write_bytes(b"x")
    watch = SourceWatch({known: Identity.of(known.stat())})
    watch.check([known, tmp_path / "no source"])
    known.unlink()
    watch.check([tmp_path / "no source"])
    with pytest.raises(CheckpointError, match="known cannot be read any more: No such file"):
        watch.check()


def test_a_page_that_cannot_be_read_is_an_error(copy, out, monkeypatch):
    lost = iter([0] * 5)
    monkeypatch.setattr(native, "lost_pages", lambda: next(lost, 3))
    with pytest.raises(CheckpointError, match="a part of its file cannot be read: look at the disk's health"):
        pipeline(copy, SafetensorsWriter(path=out)).run(workers=1)


# The handler


def lost(path, pages, left):
    """A mapped file that was cut short behind the page ``left``."""
    path.write_bytes(b"x" * pages * PAGE)
    with path.open("rb") as opened:
        mapped = native.MappedFile(opened.fileno())
    os.truncate(path, left * PAGE)
    return mapped


def test_a_page_that_is_gone_reads_as_zeros_and_is_counted(tmp_path):
    before = native.lost_pages()
    with lost(tmp_path / "file", 5, 2) as mapped, native.lost_pages_caught(), native.lost_pages_caught():
        view = np.frombuffer(mapped, np.uint8)
        assert int(view.sum()) == ord("x") * 2 * PAGE
        assert int(view.sum()) == ord("x") * 2 * PAGE, "and stays so"
        del view
    assert native.lost_pages() - before == 3


def after(prepare, then):
    """How a process ends that does this with SIGBUS as the system handles it."""

    def work():
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        prepare()
        then()

    return run_in_child(work)


def test_a_page_that_is_gone_ends_the_process_elsewhere(tmp_path):
    def caught():
        with native.lost_pages_caught():
            pass

    assert after(caught, lambda: lost(tmp_path / "file", 2, 0)[0]) == -signal.SIGBUS


def test_a_signal_that_was_sent_is_not_taken_for_a_page():
    def sent():
        with native.lost_pages_caught():
            os.kill(os.getpid(), signal.SIGBUS)

    assert after(lambda: None, sent) == -signal.SIGBUS


def test_without_an_address_for_the_zeros_the_process_ends(tmp_path):
    """Linux allows a process 65,530 mappings; the page in the middle of one would need two more."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    kept = []

    def use_up():
        mapped = lost(tmp_path / "file", 3, 0)
        with native.lost_pages_caught():
            try:
                while len(kept) <= limit:
                    kept.append(mmap.mmap(-1, PAGE))  # each is a file of its own, so that no two become one
            except OSError:
                mapped[PAGE]

    if limit > 100_000:
        pytest.skip("this system allows too many mappings to use them up")
    assert after(lambda: None, use_up) == -signal.SIGBUS


def test_a_page_that_is_gone_is_counted_once(tmp_path):
    """However often it is read, and whichever of those behind it was read before."""
    before = native.lost_pages()
    with lost(tmp_path / "file", 5, 0) as mapped, native.lost_pages_caught():
        view = np.frombuffer(mapped, np.uint8)
        for page, count in ((4, 1), (4, 1), (2, 3), (3, 3), (0, 5), (1, 5)):
            assert view[page * PAGE] == 0
            assert native.lost_pages() - before == count
        del view
