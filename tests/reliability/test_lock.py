"""A lock is held on the file that lies at its path: one on a file that was removed keeps nobody out."""

import os

import pytest

from ktforge import OutputError
from ktforge.disk import lock
from ktforge.disk.marks import LOCK, PARTIAL


def test_a_lock_that_its_owner_has_just_removed_is_taken_anew(tmp_path, monkeypatch):
    """Between opening the file and locking it, the run before has ended."""
    staging, opened = tmp_path / PARTIAL, []
    really = lock.writing.open_file

    def open_file(path):
        descriptor = really(path)
        opened.append(os.fstat(descriptor).st_ino)
        if len(opened) == 1:
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(lock.writing, "open_file", open_file)
    with lock.locked(staging):
        assert len(opened) == 2 and (staging / LOCK).stat().st_ino == opened[1]
        assert f"is being written by process {os.getpid()} on" in lock.held(staging)
        with pytest.raises(OutputError, match="is being written by"), lock.locked(staging):
            pass
    assert not (staging / LOCK).exists()


def test_a_lock_whose_folder_is_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    staging, tried = tmp_path / PARTIAL, []
    really = lock.writing.open_file

    def open_file(path):
        tried.append(path)
        if len(tried) == 1:
            path.parent.rmdir()
        return really(path)

    monkeypatch.setattr(lock.writing, "open_file", open_file)
    with lock.locked(staging):
        assert len(tried) == 2 and (staging / LOCK).exists()
    assert not staging.exists()


@pytest.mark.parametrize(
    ("owner", "here"),
    [
        ({"host": "a", "boot": "1"}, True),
        ({"host": "b", "boot": "1"}, True),
        ({"host": "a", "boot": "2"}, True),
        ({"host": "b", "boot": "2"}, False),
        ({"host": "b"}, False),
        ({}, False),
    ],
)
def test_a_host_or_a_running_kernel_is_here(monkeypatch, owner, here):
    monkeypatch.setattr(lock, "_here", lambda: {"pid": 1, "host": "a", "boot": "1"})
    assert lock._is_here(owner) == here
    monkeypatch.setattr(lock, "_here", lambda: {"pid": 1, "host": "a", "boot": ""})
    assert lock._is_here({"host": "b", "boot": ""}) is False
