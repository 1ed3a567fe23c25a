"""Every call of the file layer fails in turn: one clear sentence, and the next run finishes what was begun."""

import errno
import shutil

import pytest
from conversions import convert, loader_accepts, pipeline, tree
from faults import Disk, at, fails, short_write, torn_write
from ktforge_plugins import KtFolderWriter

from ktforge import OutputError
from ktforge.disk.marks import PARTIAL
from ktforge.output.folder import is_unfinished

#: Failures that end nothing: the lock is recognised as stale, and an empty folder is in nobody's way.
HARMLESS = {"unlink lock", "rmdir .ktforge-partial"}
FAULTS = {
    "EIO": fails(errno.EIO), "ENOSPC": fails(errno.ENOSPC), "short write": short_write, "torn write": torn_write
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "replaces"),
    [("EIO", False), ("ENOSPC", True), ("short write", False), ("torn write", False), ("torn write", True)],
)
def test_any_call_may_fail(tiny, tmp_path, fault, replaces):
    out, old = tmp_path / "out", tmp_path / "old"
    pipeline(tiny, KtFolderWriter(path=old)).run()
    before = tree(old)
    if replaces:
        shutil.copytree(old, out)
    calls = convert(tiny, out, Disk(), overwrite=replaces)
    wanted = tree(out)
    assert len(calls) > 100 and sum(c.startswith("replace") for c in calls) >= 8
    for number, call in enumerate(calls, 1):
        if fault.endswith("write") and not call.startswith("pwrite"):
            continue
        shutil.rmtree(out)
        if replaces:
            shutil.copytree(old, out)
        try:
            convert(tiny, out, Disk(at(number, FAULTS[fault])), overwrite=replaces)
            assert fault == "short write" or call in HARMLESS, call
        except OutputError as error:
            assert fault != "short write", call
            assert len(error.problems) == 1 and "cannot be written: " in str(error), call
            assert ("make room" in str(error)) == (fault in ("ENOSPC", "torn write")), call
            found = {n: h for n, h in tree(out).items() if not n.startswith(PARTIAL)} if out.exists() else {}
            if found != wanted:
                assert (loader_accepts(out) == replaces and found == before) or not loader_accepts(out), call
            if found != wanted or is_unfinished(out):
                convert(tiny, out, Disk(), overwrite=replaces)
        left = {PARTIAL + "/lock"} if call in HARMLESS else set()
        assert {n: h for n, h in tree(out).items() if n not in left} == wanted, call


def test_a_file_system_that_holds_no_such_files_is_told_from_a_full_one(tiny, tmp_path):
    def fat(call):
        return fails(errno.EFBIG)(call) if call.name == "ftruncate" and "model-" in call.path.name else call.really()

    with pytest.raises(
        OutputError, match=r"cannot be written: File too large: write smaller shards \(max_shard_size\)"
    ):
        convert(tiny, tmp_path / "out", Disk(fat))
    assert is_unfinished(tmp_path / "out")
