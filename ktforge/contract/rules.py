"""Which weights are quantised, and how: ordered rules by tensor name, the first match wins."""

from __future__ import annotations

import fnmatch
import re
from functools import cached_property

from pydantic import BaseModel, ConfigDict, InstanceOf, field_validator

from ktforge.contract.stages import Quantizer

REGEX = "re:"


class Rule(BaseModel):
    """``match`` is a glob (``*.mlp.down_proj.weight``) or, behind ``re:``, a regular expression that must match from
    the name's beginning. ``quantizer`` None keeps the weight as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    match: str
    quantizer: InstanceOf[Quantizer] | None

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
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
