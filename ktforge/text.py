"""Sizes, counts and names as people read and write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """``5GB`` → 5_000_000_000, as Hugging Face counts; GiB and the like count in powers of two. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text[:40]!r} is not a size such as 5GB, 500MB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def size_text(count: int) -> str:
    """A number of bytes in the unit that suits it: ``17.67 GB``, ``4.10 kB``, ``1 byte``; powers of ten."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return counted(count, "byte")


def counted(count: int, word: str) -> str:
    """``1 file``, ``2 files``, ``6,144 experts``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """``text`` with everything spelled out that would steer a terminal or begin a line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, limit: int = 4000) -> str:
    """``text`` without its middle, if it is longer than any sentence: names and values in it may be a stranger's."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} … {len(text) - limit:,} more characters … {text[-limit // 2 :]}"


def nearest(word: str, known: Collection[str]) -> str:
    """`` (did you mean kt-amx?)`` for a word that is nearly one of ``known``, else nothing."""
    near = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def first_of(sentences: Sequence[str], limit: int = 20) -> list[str]:
    """The first sentences of a list, and one that says how many more there are."""
    more = [f"and {len(sentences) - limit:,} more of the kind"] if len(sentences) > limit else []
    return [*sentences[:limit], *more]
