"""Standard output and error as a command needs them, whatever it was started with."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


def prepare() -> None:
    """Gives the command streams that it can write to.

    A descriptor that is closed would become that of the next file that is opened, and what a library says on it would
    go there: /dev/null takes its place, opened so that writing to it fails. Characters that a terminal's encoding does
    not have are spelled out. What cannot be said on standard error is not said, and ends nothing.
    """
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            assert opened == number, "the lowest number that is free"
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a test has put another in its place
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = cast(TextIO, _Patient(sys.stderr))


def give_up() -> None:
    """After an error of standard output: what waits to be written there is dropped, so that no exit code changes."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


class _Patient:
    """A stream whose writes may fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
