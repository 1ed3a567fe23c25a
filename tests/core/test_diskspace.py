import os
import resource
from collections import namedtuple

import pytest

from ktforge.checkpoint import PARTIAL, UNFINISHED
from ktforge.diskspace import shortages
from ktforge.tensors import FileSpec

FILES = (FileSpec("a", bytes(3 * 4096), ()), FileSpec("b/c", bytes(5 * 4096), ()))


@pytest.fixture
def free(monkeypatch):
    """Sets the number of free bytes."""

    def to(count):
        monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "total used free")(10**6, 0, count))

    return to


def test_every_byte_counts(out, free):
    free(8 * 4096)
    assert list(shortages(out, FILES)) == []
    free(8 * 4096 - 1)
    (problem,) = shortages(out, FILES)
    assert problem.startswith("the output needs 32.77 kB, but only 32.77 kB are free at ")
    assert problem.endswith(f"{out.parent}: make room or write elsewhere")


@pytest.mark.parametrize("published", [False, True])
def test_what_is_there_already_needs_no_room_but_holes_do(out, free, published):
    staging = out / PARTIAL
    (staging / "b").mkdir(parents=True)
    (staging / "b" / "c.partial").write_bytes(bytes([1]) * 4096)
    os.truncate(staging / "b" / "c.partial", 5 * 4096)
    if published:
        (out / "a").write_bytes(bytes([1]) * 3 * 4096)
        (out / UNFINISHED).touch()
    needed = (4 if published else 7) * 4096
    free(needed)
    assert list(shortages(out, FILES)) == []
    free(needed - 1)
    assert len(list(shortages(out, FILES))) == 1


def test_file_names_may_run_out_too(out, free, monkeypatch):
    free(10**6)
    values = {"f_files": 100, "f_favail": 1}
    monkeypatch.setattr("os.statvfs", lambda path: namedtuple("statvfs", values)(**values))
    (problem,) = shortages(out, FILES)
    assert "the output has 2 files, but" in problem and "has room for 1 more: remove files there" in problem
    values["f_files"] = 0
    assert list(shortages(out, FILES)) == []


def test_a_limit_on_the_size_of_files(out, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * 4096 - 1, -1))
    (problem,) = shortages(out, FILES)
    assert "`ulimit -f` allows 20.48 kB: raise it, or write smaller shards" in problem
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 * 4096, -1))
    assert list(shortages(out, FILES)) == []
