"""What is said of a disk's errors, by what mends them."""

import errno
import os

import pytest
from conversions import convert, model
from faults import Disk, fails

from ktforge import OutputError
from ktforge.output.folder import is_unfinished

ROOM = ": make room, then run the same command again"
SMALLER = ": write smaller shards (max_shard_size), or to a file system that holds larger files"


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, ROOM), (errno.EDQUOT, ROOM), (errno.EFBIG, SMALLER), (errno.EIO, ""), (errno.EROFS, ""),
        (errno.EACCES, ""), (errno.ESTALE, ""),
    ],
)  # fmt: skip
def test_an_error_has_its_mend(tmp_path, out, number, mend):
    source = model(tmp_path / "model", 1, 1, 128, 128)

    def action(call):
        is_weight = call.name == "pwrite" and call.path.name.startswith("model")
        return fails(number)(call) if is_weight else call.really()

    with pytest.raises(OutputError) as caught:
        convert(source, out, Disk(action))
    (problem,) = caught.value.problems
    assert problem.endswith(f".partial cannot be written: {os.strerror(number)}{mend}")
    assert is_unfinished(out)
    convert(source, out, Disk())
