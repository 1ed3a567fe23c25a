"""A file that was cut short while it was mapped, and is whole again: every loader that maps files reads it anew."""

import gc
import os

import numpy as np
import pytest
import torch
from conversions import model, pipeline
from faults import run_in_child
from ktforge_plugins import AutoLoader, BinLoader, KtFolderWriter, SafetensorsLoader, SafetensorsWriter
from ktforge_plugins.loaders.kt_folder import KtFolderLoader

from ktforge import CheckpointError, Registry, native
from ktforge.running.execute import execute


def safetensors_folder(folder):
    return SafetensorsLoader(path=model(folder, 1, 2, 512, 256, shards=1))


def auto_folder(folder):
    return AutoLoader(path=model(folder, 1, 2, 512, 256, shards=1))


def bin_folder(folder):
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(512, 256, generator=random, dtype=torch.bfloat16) for i in range(3)}
    torch.save(state, folder / "pytorch_model.bin")
    return BinLoader(path=folder)


def kt_folder(folder):
    source = model(folder.with_name("source"), 1, 2, 512, 256)
    pipeline(source, KtFolderWriter(path=folder)).run(workers=1)
    return KtFolderLoader(path=folder)


LOADERS = [safetensors_folder, auto_folder, bin_folder, kt_folder]


class Cut:
    """The largest tensor of a loader, and its file, which is empty within, and whole again after it."""

    def __init__(self, loader):
        self.spec = max(loader.scan(), key=lambda spec: (spec.nbytes, spec.offset))
        self.content, self.times = self.spec.file.read_bytes(), os.stat(self.spec.file)

    def __enter__(self):
        os.truncate(self.spec.file, 0)

    def __exit__(self, *_):
        self.spec.file.write_bytes(self.content)
        os.utime(self.spec.file, ns=(self.times.st_atime_ns, self.times.st_mtime_ns))


@pytest.mark.parametrize("make", LOADERS)
def test_a_file_that_is_whole_again_is_mapped_anew(tmp_path, make):
    loader = make(tmp_path / "folder")
    cut = Cut(loader)
    want = np.array(loader.read(cut.spec)).tobytes()
    with native.lost_pages_caught():
        view, before = loader.read(cut.spec), native.lost_pages()
        with cut:
            assert not any(view.tobytes()) and native.lost_pages() > before
        assert not any(view.tobytes()), "what was handed out stays as it is"
        assert loader.read(cut.spec).tobytes() == want
    assert loader.read(cut.spec).tobytes() == want, "behind the run, too"
    loader.release(cut.spec)
    assert loader.read(cut.spec).tobytes() == want


@pytest.mark.parametrize("make", LOADERS)
def test_what_was_handed_out_is_watched_for_as_long_as_it_lives(tmp_path, make):
    """By then the loader has mapped the file again, looked at the folder again, or is gone."""
    loader = make(tmp_path / "folder")
    cut = Cut(loader)

    def read_late():
        with native.lost_pages_caught():
            view = loader.read(cut.spec)
            first, last = view.reshape(-1)[:64].view(np.uint8), view.reshape(-1)[-64:].view(np.uint8)
            del view
            with cut:
                assert not last.any()
            loader.read(cut.spec)
            list(loader.scan())
            with cut:
                assert not first.any()
        os._exit(7)

    assert run_in_child(read_late) == 7


@pytest.mark.parametrize("make", LOADERS)
def test_nothing_is_watched_once_nobody_reads_it(tmp_path, make, monkeypatch):
    watched = []
    real = native.WatchedRanges.__init__

    def counted(self, ranges):
        real(self, ranges)
        watched.extend(self._starts)

    monkeypatch.setattr(native.WatchedRanges, "__init__", counted)
    loader = make(tmp_path / "folder")
    cut = Cut(loader)
    with native.lost_pages_caught():
        view = loader.read(cut.spec)
        with cut:
            view.tobytes()
    assert any(native.pages.lib.ktq_lost_pages_of(start) for start in watched)
    del view, loader
    gc.collect()
    assert watched and not any(native.pages.lib.ktq_lost_pages_of(start) for start in watched)


def test_a_plan_that_is_executed_once_more_reads_what_is_there(tmp_path):
    """The file is short by the first time, and as it was by the second."""
    source, whole = model(tmp_path / "model", 1, 2, 512, 256, shards=1), tmp_path / "whole"
    pipeline(source, SafetensorsWriter(path=whole)).run(workers=1)
    plan = pipeline(source, SafetensorsWriter(path=tmp_path / "out")).plan()
    cut = Cut(plan.pipeline.loader)
    plan.pipeline.loader.read(cut.spec)  # so it is mapped before it is cut

    with cut, pytest.raises(CheckpointError):
        execute(plan, Registry().hook, workers=1)
    execute(plan, Registry().hook, workers=1)
    for file in whole.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
