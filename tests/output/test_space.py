import os
import resource
from collections import namedtuple

import pytest

from ktforge.contract.tensors import FileSpec
from ktforge.disk.marks import PARTIAL, UNFINISHED
from ktforge.disk.system import quota_left
from ktforge.output.space import shortages

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


@pytest.fixture
def quotas(monkeypatch):
    """Sets what the system answers: (kind, user or group) → (limit in KiB, bytes in use); nothing else has a quota."""
    known = {}

    class System:
        @staticmethod
        def syscall(call, descriptor, command, number, limits):
            found = known.get((command.value & 0xFF, number.value))
            assert call.value == 443 and command.value & 0xFFFFFFFF >> 8 << 8 == 0x80000700
            if found is None:
                return -1
            limits._obj.hard_blocks, limits._obj.bytes = found
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: System)
    return known


def test_the_quotas_of_user_and_group_count(out, free, quotas):
    free(10**6)
    assert list(shortages(out, FILES)) == []
    quotas[0, os.geteuid()] = 32, 0
    assert list(shortages(out, FILES)) == []
    quotas[0, os.geteuid()] = 32, 1
    (problem,) = shortages(out, FILES)
    assert "but your quota leaves " in problem and problem.endswith(": make room or write elsewhere")
    quotas[0, os.geteuid()] = 0, 10**9  # used, but not limited
    assert list(shortages(out, FILES)) == []
    quotas[1, os.getegid()] = 1, 10**9
    assert len(list(shortages(out, FILES))) == 1
    assert quota_left(out.parent) == 0


def test_a_folder_may_say_whose_group_counts(tmp_path, quotas, monkeypatch):
    monkeypatch.setattr(os, "getegid", lambda: 4711)
    quotas[1, 4711] = 1, 0
    assert quota_left(tmp_path) == 1024
    tmp_path.chmod(0o2755)
    quotas[1, tmp_path.stat().st_gid] = 2, 0
    assert quota_left(tmp_path) == 2048


def test_a_folder_that_cannot_be_opened_has_unknown_quotas(tmp_path, quotas, monkeypatch):
    def denied(*arguments):
        raise PermissionError(13, "Permission denied")

    quotas[0, os.geteuid()] = 1, 0
    assert quota_left(tmp_path) == 1024
    monkeypatch.setattr(os, "open", denied)
    assert quota_left(tmp_path) is None


def test_a_system_without_quotas_is_asked_in_vain(tmp_path):
    assert quota_left(tmp_path) is None or quota_left(tmp_path) >= 0
