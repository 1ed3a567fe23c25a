"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """``5GB`` → 5_000_000_000, as Hugging Face counts; GiB and the like count in powers of two. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text[:40]!r} is no size such as 5GB, 500MB or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
