"""What can go wrong, by who can mend it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class KtforgeError(Exception):
    """Anything ktforge refuses or fails at. ``problems`` holds one sentence per thing to mend, one at least: what is
    refused without a word would be lost without a word. Raises TypeError if there is none."""

    def __init__(self, *problems: str) -> None:
        if not problems or not all(isinstance(problem, str) and problem for problem in problems):
            raise TypeError(f"{type(self).__name__} needs a sentence that says what is wrong")
        self.problems = problems
        super().__init__("\n".join(problems))


class ConfigError(KtforgeError):
    """The pipeline file or an option is wrong; the sentence names file, line and key."""


class CheckpointError(KtforgeError):
    """The source checkpoint is broken or of a form that cannot be read; the sentence names file and tensor."""


class UnknownExperts(CheckpointError):
    """config.json announces experts, and no tensor has an expert's name: the checkpoint may be packed already."""


class PlanError(KtforgeError):
    """The plan refuses: what was asked for cannot be made of this checkpoint, here."""


class OutputError(KtforgeError):
    """The output folder cannot be written."""


class AlreadyDone(OutputError):
    """The output folder holds exactly what was to be written, finished: there is nothing to do."""


class PluginError(KtforgeError):
    """Code of a plugin failed or broke its contract; the sentence begins with the plugin and its distribution."""


class Unsupported(KtforgeError):
    """Raised by a stage's ``plan``: why it cannot take this unit. The host adds the unit's name."""


class Problems:
    """Collects refusals, so that all can be shown at once and the same one about 15,000 experts takes one line."""

    def __init__(self) -> None:
        self._units: dict[str, list[str]] = {}

    def add(self, message: str, unit: str = "") -> None:
        self._units.setdefault(message, []).append(unit)

    def extend(self, messages: Iterable[str]) -> None:
        for message in messages:
            self.add(message)

    def lines(self) -> tuple[str, ...]:
        """One line a refusal, 100 at most."""
        lines = [self._line(message, units) for message, units in islice(self._units.items(), 100)]
        more = [f"and {len(self._units) - 100:,} more refusals"] if len(self._units) > 100 else []
        return (*lines, *more)

    @staticmethod
    def _line(message: str, units: list[str]) -> str:
        if not units[0]:
            return message
        more = f" (and {len(units) - 1:,} more)" if len(units) > 1 else ""
        return f"{units[0]}{more}: {message}"
