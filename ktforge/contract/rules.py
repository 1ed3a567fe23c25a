"""Which weights are quantised, and how: ordered rules by tensor name, the first match wins."""

from __future__ import annotations

import fnmatch
import re
from functools import cached_property

from pydantic import BaseModel, ConfigDict, InstanceOf, field_validator

from ktforge.contract.stages import Quantizer

REGEX = "re:"
#: Characters of a pattern; those in use have up to 80.
PATTERN_LIMIT = 200
#: Repetitions and groups of a pattern; those in use have up to 3 and 2.
CHOICES_LIMIT = 4


class Rule(BaseModel):
    """``match`` is a glob (``*.mlp.down_proj.weight``) or, behind ``re:``, a regular expression that must match from
    the name's beginning. ``quantizer`` None keeps the weight as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    match: str
    quantizer: InstanceOf[Quantizer] | None

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
        if len(match) > PATTERN_LIMIT or (match.startswith(REGEX) and may_take_forever(_regex(match))):
            raise ValueError(
                f"{match[:80]!r} may take forever to match: write it without repeated groups, with "
                f"{CHOICES_LIMIT} repetitions and groups at most, or as several rules"
            )
        try:
            re.compile(_regex(match))
        except re.error as error:
            raise ValueError(f"{match!r} is no regular expression: {error}") from error
        return match

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_regex(self.match))

    def matches(self, name: str) -> bool:
        return self._pattern.match(name) is not None


def _regex(match: str) -> str:
    return match.removeprefix(REGEX) if match.startswith(REGEX) else fnmatch.translate(match)


def may_take_forever(pattern: str) -> bool:
    """Matching takes exponential time where a group is repeated, else a power of the name's length with as many factors
    as there are repetitions, and a factor for each group's alternatives."""
    plain = re.sub(r"\\.", "_", pattern, flags=re.DOTALL)
    repetitions, groups = len(re.findall(r"(?<!\()[*+?{]", plain)), plain.count("(")
    repeated_group = re.search(r"\)[*+{]", plain) is not None
    return repeated_group or len(pattern) > PATTERN_LIMIT or max(repetitions, groups) > CHOICES_LIMIT
