"""System calls that Python's os does not have."""

import mmap

import numpy as np
import pytest

from ktforge.disk import system

PAGE = mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="pages are let go of where the system can")
@pytest.mark.parametrize(
    ("start", "nbytes", "gone"),
    [(PAGE, PAGE, {1}), (PAGE + 10, PAGE, {1, 2}), (0, 1, {0}), (2 * PAGE, 2 * PAGE, {2, 3})],
)
def test_the_pages_of_a_range_are_let_go_of_and_no_others(tmp_path, start, nbytes, gone):
    """Seen by what was written to a copy of them, which goes with them."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * 5 * PAGE)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        view[:] = ord("b")
        system.drop_pages(view.ctypes.data + start, nbytes)
        assert {page for page in range(5) if view[page * PAGE] == ord("a")} == gone
        del view
