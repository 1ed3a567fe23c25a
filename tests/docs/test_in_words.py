"""The generated pages say types in words, without Python's notation for them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import generate
import numpy as np
import pytest
from annotated_types import Gt
from in_words import in_words

from ktforge import Loader, UnitSpec


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (Path | None, "a path or nothing"),
        (None | str, "text or nothing"),
        (Literal["mmap", "pread", "auto"], "`mmap`, `pread` or `auto`"),
        (Literal["channel"] | Annotated[int, Gt(0)], "`channel` or a whole number, above 0"),
        (Sequence[UnitSpec], "a sequence of `UnitSpec`"),
        (Sequence[Path], "a sequence of paths"),
        (Iterable[type[Loader]], "any number of subclasses of `Loader`"),
        (Iterator[UnitSpec], "`UnitSpec`, one after another"),
        (tuple[int, ...], "several whole numbers"),
        (tuple[int, int], "two whole numbers"),
        (tuple[int, str], "(a whole number, text)"),
        (Mapping[str, Any], "a mapping of text to anything"),
        (dict[str, np.ndarray], "a mapping of text to an array"),
        (Callable[[int], str] | None, "a function or nothing"),
    ],
)
def test_a_type_in_words(kind, words):
    assert in_words(kind) == words


@pytest.mark.parametrize("path", generate.PAGES)
def test_no_page_shows_the_notation_of_types(path):
    notation = (
        r"typing\.|Annotated|ForwardRef|<class|<int|\[x>=|\b[A-Z][a-z]\w+\[|\b(tuple|list|dict|type)\[|\| None| -> "
    )
    found = [line for line in generate.PAGES[path]().splitlines() if re.search(notation, line)]
    assert found == []
